"""The tokenizer of a GGUF file, with the same ids as llama.cpp."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from services.common.errors import QuireError, Reason
from services.executor.models.pre_tokenizers import find_pre_tokenizer
from services.executor.models.tokenizer_json import TokenType, Vocabulary, byte_level_bpe, sentencepiece_bpe

log = logging.getLogger("quire.executor.models")

# Control tokens that some files mark as normal; a template's text must still become these tokens.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) from a file's metadata. Raises MODEL_LOAD_FAILED for other vocabularies.

    A wish to end prompts with EOS (`add_eos_token`) is not followed: a prompt is there to be continued.
    """
    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "tokens" not in keys:
        raise QuireError(Reason.MODEL_LOAD_FAILED, "the file has no vocabulary (tokenizer.ggml.tokens)")
    vocabulary = _vocabulary(keys)
    model = keys.get("model")
    if model == "gpt2":
        scheme = find_pre_tokenizer(keys.get("pre") or _missing_scheme())
        tokenizer = byte_level_bpe(vocabulary, keys.get("merges", []), scheme)
        adds_bos, defaults = scheme.adds_bos, {}
    elif model == "llama":
        scores = keys.get("scores")
        if scores is None or len(scores) != len(vocabulary.tokens):
            raise QuireError(Reason.MODEL_LOAD_FAILED, "the vocabulary has no score for each token")
        tokenizer = sentencepiece_bpe(vocabulary, scores, space_prefix=keys.get("add_space_prefix", True))
        adds_bos, defaults = True, {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"tokenizer.ggml.model: {model!r} vocabularies are not supported")
    config: dict[str, Any] = {
        "chat_template": metadata.get("tokenizer.chat_template"),
        "add_bos": bool(keys.get("add_bos_token", adds_bos)),
    }
    if (for_tools := metadata.get("tokenizer.chat_template.tool_use")) is not None:
        config["tool_template"] = for_tools
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}.items():
        token_id = keys.get(f"{key}_token_id", defaults.get(key))
        if token_id is not None and token_id < len(vocabulary.tokens):
            config[f"{name}_token"] = vocabulary.tokens[token_id]
    return tokenizer, config


def _vocabulary(keys: Mapping[str, Any]) -> Vocabulary:
    tokens = [token or f"[EMPTY_{at}]" for at, token in enumerate(keys["tokens"])]
    types = list(keys.get("token_type", [TokenType.NORMAL] * len(tokens)))
    if len(types) == len(tokens):
        for at, token in enumerate(tokens):
            if token in END_OF_TURN:
                types[at] = TokenType.CONTROL
    return Vocabulary(tokens, types)


def _missing_scheme() -> str:
    log.warning("the model does not say how to split text (tokenizer.ggml.pre); its answers may be worse for it")
    return "default"
