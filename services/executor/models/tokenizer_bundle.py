"""The tokenizer bundle: all that a gateway needs to speak a model's language, as one zip.

The same files give the same bytes on every machine (stored, not compressed), so that their hash names them.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from services.common.errors import QuireError, Reason
from services.executor.models.derived import derived
from services.executor.models.fields import read_object
from services.executor.models.gguf_metadata import read_header
from services.executor.models.gguf_tokenizer import tokenizer_from_gguf
from services.executor.models.sentencepiece_file import read_sentencepiece
from services.executor.models.tokenizer_json import sentencepiece_bpe
from services.executor.models.weights import load_failed

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", TOOL_TEMPLATE)
SPECIAL_STRINGS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_bundle(path: Path) -> bytes:
    """The bundle of a Hugging Face folder or a GGUF file, from the cache where nothing changed. Raises as below."""
    files = [path] if path.is_file() else [path / name for name in FOLDER_FILES if (path / name).is_file()]
    return derived("tokenizers", files, lambda: build_bundle(path))


def build_bundle(path: Path) -> bytes:
    """The same, made anew. Raises MODEL_LOAD_FAILED where there is none."""
    import tokenizers  # not needed where the cache has it

    try:
        tokenizer, config = tokenizer_from_gguf(read_header(path).fields) if path.is_file() else _from_folder(path)
        text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        tokenizers.Tokenizer.from_str(text)
        files = {
            "tokenizer.json": text.encode(),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, sort_keys=True).encode(),
        }
    except QuireError:
        raise
    except Exception as error:  # what the library raises; and files may hold anything anywhere
        raise load_failed(f"{path.name}: the tokenizer cannot be used: {type(error).__name__}: {error}") from error
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in files.items():
            bundle.writestr(zipfile.ZipInfo(name, ZIP_EPOCH), content)
    return buffer.getvalue()


def _from_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    source = _read_json(path / "tokenizer_config.json") or {}
    adds_bos = source.get("add_bos_token")
    special = {name: text for name in SPECIAL_STRINGS if (text := _text(source.get(name)))}
    tokenizer = _read_json(path / "tokenizer.json")
    if tokenizer is not None:
        # The gateway decides on the beginning token itself, and never cuts or fills.
        processor, tokenizer["post_processor"] = tokenizer.get("post_processor"), None
        tokenizer["truncation"] = tokenizer["padding"] = None
        if adds_bos is None:
            adds_bos = "bos_token" in special and _begins_with(processor, special["bos_token"])
    elif (path / "tokenizer.model").is_file():
        model = read_sentencepiece(path / "tokenizer.model")
        tokenizer = sentencepiece_bpe(model.vocabulary, model.scores, space_prefix=model.space_prefix)
        tokenizer["added_tokens"] = _merge_added(tokenizer["added_tokens"], source.get("added_tokens_decoder", {}))
        adds_bos = True if adds_bos is None else adds_bos
    else:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED, f"{path}: neither tokenizer.json nor tokenizer.model, so no text can be read"
        )
    config = {"chat_template": _chat_template(path, source), "add_bos": bool(adds_bos)} | special
    if (for_tools := _tool_template(path, source)) is not None:
        config["tool_template"] = for_tools
    return tokenizer, config


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.exists() else None


def _text(token: Any) -> str | None:
    """A special token is written as a string or as an object."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _begins_with(processor: dict[str, Any] | None, token: str) -> bool:
    """Whether the post-processor of a tokenizer.json puts this token in front of a text."""
    if processor is None:
        return False
    if processor["type"] == "Sequence":
        return any(_begins_with(step, token) for step in processor["processors"])
    if processor["type"] != "TemplateProcessing" or not processor["single"]:
        return False
    first = processor["single"][0]
    return bool(first.get("SpecialToken", {}).get("id") == token)


def _chat_template(path: Path, source: dict[str, Any]) -> str | None:
    """The default template: a file of its own, or a string, or one of several named ones in the config."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = source.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _tool_template(path: Path, source: dict[str, Any]) -> str | None:
    """The template for chats with tools, where the model has one of its own."""
    file = path / TOOL_TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = source.get("chat_template")
    if (path / "chat_template.jinja").is_file() or not isinstance(template, list):
        return None
    return next((entry["template"] for entry in template if entry["name"] == "tool_use"), None)


def _merge_added(own: list[dict[str, Any]], extra: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Added tokens of the vocabulary, overridden and extended by those of tokenizer_config.json."""
    entries = {entry["id"]: entry for entry in own}
    for token_id, entry in extra.items():
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        entries[int(token_id)] = {"id": int(token_id)} | flags | entry
    return [entries[token_id] for token_id in sorted(entries)]
