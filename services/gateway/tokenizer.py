"""One model's tokenizer and chat template, from the bundle that its executor serves.

Rule for the beginning-of-text token (BOS): where the model's tokenizer adds one, text and chats get it unless the
text, or what the template wrote, begins with it already. So a prompt never has two.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from services.common.errors import QuireError, Reason
from services.gateway.chat_template import ChatTemplate
from services.gateway.detokenizer import IncrementalDetokenizer
from services.gateway.output.template_facts import MARKS, TemplateFacts
from services.gateway.token_pieces import TokenPieces

SHORT_CHARACTERS = 4096


class ModelTokenizer:
    """Text to ids and back. Immutable once made, so any number of threads may share it."""

    def __init__(self, tokenizer_json: str, config: Mapping[str, Any], fingerprint: str = "") -> None:
        """`config` has chat_template, add_bos and the special strings, such as bos_token and eos_token.

        Where there is a tool_template, it is for chats with tools.
        """
        self.fingerprint = fingerprint
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        bos, eos = config.get("bos_token"), config.get("eos_token")
        self.bos_id: int | None = self._tokenizer.token_to_id(bos) if bos else None
        self.eos_id: int | None = self._tokenizer.token_to_id(eos) if eos else None
        self.adds_bos = bool(config.get("add_bos")) and self.bos_id is not None
        strings = {name: text for name, text in config.items() if name.endswith("_token") and isinstance(text, str)}
        template, for_tools = config.get("chat_template"), config.get("tool_template")
        self._template = ChatTemplate(template, strings) if template else None
        self._tool_template = ChatTemplate(for_tools, strings) if for_tools else self._template
        decoder = json.loads(tokenizer_json)["decoder"]
        self._all = TokenPieces(self._text_of, decoder)
        self._without_special = TokenPieces(self._text_of, decoder, skip=self.special_ids)
        self._marks = frozenset(token_id for token_id in self.special_ids if added[token_id].content in MARKS)
        self._with_marks = self._without_special
        if self._marks:
            self._with_marks = TokenPieces(self._text_of, decoder, skip=self.special_ids - self._marks)

    @classmethod
    def from_bundle(cls, data: bytes) -> ModelTokenizer:
        """Reads a bundle. Raises PROTOCOL where it is not one."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as bundle:
                tokenizer = bundle.read("tokenizer.json").decode()
                config = json.loads(bundle.read("tokenizer_config.json"))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise QuireError(Reason.PROTOCOL, f"not a tokenizer bundle: {error}") from error
        return cls(tokenizer, config, hashlib.sha256(data).hexdigest())

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of plain text; the texts of special tokens become those tokens."""
        ids = self._encode(text)
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode(self, text: str) -> list[int]:
        # `encode` holds the GIL all the time and `encode_batch_fast` does not; but the latter waits for a worker.
        if len(text) <= SHORT_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of a whole sequence. Ids beyond the vocabulary add nothing."""
        detokenizer = IncrementalDetokenizer(self, (), skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def pieces(self, skip_special: bool) -> TokenPieces:
        """The bytes of each token, with special ones empty or not."""
        return self._without_special if skip_special else self._all

    def showing_marks(self) -> MarkedVocabulary:
        """The same for whoever reads thinking and calls: special tokens that mark these are text as any other."""
        return MarkedVocabulary(self, self._with_marks, self._marks)

    @property
    def facts(self) -> TemplateFacts:
        """What the chat templates show of the model."""
        if self._template is None or self._tool_template is None:
            return TemplateFacts()
        return self._template.facts.with_tools_of(self._tool_template.facts)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: possibly part of a character; the text of a special token."""
        return self._all[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> str:
        """The prompt that the model's template makes of {role, content, ...} messages, ready for the answer.

        CPU-bound: call it off the event loop. Raises INVALID_FIELD where the template refuses the messages.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise QuireError(
                Reason.UNSUPPORTED, "this model has no chat template; send its prompt as text", field="chat"
            )
        return template.render(messages, tools, thinking)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """Ids of the rendered chat, with exactly one BOS where the model's tokenizer or template has one."""
        return self.encode(self.render_chat(messages, tools, thinking))

    def _text_of(self, token_id: int) -> str | None:
        if not 0 <= token_id < 2**32:
            return None
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text


class MarkedVocabulary:
    """A tokenizer's tokens, of which some special ones are text."""

    def __init__(self, tokenizer: ModelTokenizer, shown: TokenPieces, marks: frozenset[int]) -> None:
        self._tokenizer, self._shown, self._marks = tokenizer, shown, marks

    def pieces(self, skip_special: bool) -> TokenPieces:
        return self._shown if skip_special else self._tokenizer.pieces(False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id not in self._marks and self._tokenizer.is_special(token_id)
