"""Writes tokenizer_goldens.json: ids that llama.cpp gives for small vocabularies and awkward texts.

Run by hand, in an environment with `cyllama` (llama.cpp for Python), `tokenizers`, `gguf` and numpy:

    python -m tests.unit.executor.make_tokenizer_goldens
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GOLDENS = Path(__file__).with_name("tokenizer_goldens.json")
CORPUS = Path(__file__).parents[3] / "docs" / "design.md"
SCHEMES = (
    "default llama-bpe dbrx glm4 gpt-2 smollm qwen2 qwen35 tekken gpt-4o deepseek-v3 deepseek-coder falcon poro-chat "
    "viking"
)
TEXTS = [
    "Hello world",
    " Hello  world   ",
    "\n\n\n  \n x",
    "I'm we'LL they'Ve DON'T o'clock 's 'S",
    "12345 1 22 333 4444 3.14159 1,000,000 ٣٤٥ Ⅷ ½",
    "naïve café Ünïcödé e\u0301 a\u0308o\u0304",
    "日本語のテキスト、漢字とカナ。mixed中文English123テスト",
    "Привет, мир! مرحبا بالعالم हिन्दी में ไทยภาษา 한국어 ㄱㄴㄷ",
    "😀😃🏳️‍🌈👨‍👩‍👧‍👦 🤷🏽",
    "tabs\t\tand\r\nwindows\r\n\r\nlines\r",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff",
    "def f(x):\n    return x**2 + {'a': [1,2,3]}  # comment\n\n\n\tif x:\n",
    "<|im_start|>user\nhi<|im_end|>\n<s>x</s> <unk> y\n\nz",
    "50 = 120 ^_^ `code` |pipe| <tag> https://example.com/path?q=1&b=2#frag",
    "THE QUICK BrownFox camelCaseWords XMLHttpRequest iPhone15Pro",
    "don’t “quote” — dash… ....!!!???---___=== " + " " * 30 + "x" + "\n" * 9 + "y",
]


def random_texts(count: int) -> list[str]:
    draw = random.Random(5)
    letters = "aAbB zé1२0'’.,!?\n\t\r  \u00a0中文あ😀$<>_-ſK'sʼn\u0301"
    return ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(count)]


def byte_level_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([CORPUS.read_text(), *TEXTS * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"model": "gpt2", "tokens": tokens, "token_type": [3] * 3 + [1] * (len(tokens) - 3), "merges": merges}


def sentencepiece_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([CORPUS.read_text()], trainers.BpeTrainer(vocab_size=700))
    pieces = sorted(tokenizer.get_vocab().keys() - {"\n\n"}, key=tokenizer.get_vocab().get)
    pieces = [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(at) for at in range(len(pieces))]
    tokens += ["<|im_end|>", "\n\n"]  # a control token and a user-defined one
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [*types, 3, 4],
        "scores": [*scores, 0.0, 0.0],
    }


def write_model(path: Path, vocabulary: dict[str, Any]) -> None:
    """A Llama of zeros with this vocabulary: llama.cpp loads no vocabulary alone."""
    count = len(vocabulary["tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(count)
    writer.add_rope_dimension_count(32)
    for key, value in vocabulary.items():
        name = f"tokenizer.ggml.{key}"
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](name, value)
    square, row = (32, 32), (32,)
    shapes = {"token_embd": (count, 32), "output_norm": row, "blk.0.attn_norm": row, "blk.0.ffn_norm": row}
    shapes |= {f"blk.0.attn_{part}": square for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": square for part in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    from cyllama.llama import llama_cpp

    model = llama_cpp.LlamaModel(str(path), llama_cpp.LlamaModelParams())
    vocabulary = model.get_vocab()
    return [vocabulary.tokenize(text, False, True) for text in texts]


def main() -> None:
    texts = TEXTS + random_texts(12)
    vocabularies = {"gpt2": byte_level_vocabulary(), "llama": sentencepiece_vocabulary()}
    runs: dict[str, dict[str, Any]] = {scheme: {"model": "gpt2", "pre": scheme} for scheme in SCHEMES.split()}
    runs |= {"spm": {"model": "llama"}, "spm-no-prefix": {"model": "llama", "add_space_prefix": False}}
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in runs.items():
            path = Path(folder) / f"{name}.gguf"
            write_model(path, vocabularies[keys["model"]] | keys)
            ids[name] = llama_cpp_ids(path, texts)
    content = {"vocabularies": vocabularies, "runs": runs, "texts": texts, "ids": ids}
    GOLDENS.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")))


if __name__ == "__main__":
    main()
