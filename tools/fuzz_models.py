"""Opens damaged model files for as long as one likes: each must load or be refused, within bounds of memory and time.

    python tools/fuzz_models.py --minutes 60

A case is a seed and a number: `--from N --count 1` shows it again. What a case may end in: a model whose tensors can
all be read, or QuireError with MODEL_LOAD_FAILED or INVALID_FIELD and a message of one page. Cases run in a process of
their own, whose address space is bounded; one that takes too long or dies is reported and passed over.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CASE_SECONDS = 60  # by the clock, on a machine that has other work
CASE_COMPUTE = 5.0  # seconds of a processor
MEMORY = 1 << 30  # bytes of address space beyond what the process has when it begins
PER_PROCESS = 2_000


def main() -> int:
    """0 where all cases ended as they may."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--count", type=int, default=1 << 62)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_cases(Path(args.child), args.seed, args.first, args.count)
        return 0
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        make_models(Path(folder))
        return supervise(Path(folder), args.seed, args.first, args.first + args.count, args.minutes * 60)


def supervise(folder: Path, seed: int, first: int, end: int, seconds: float) -> int:
    """Runs cases in child processes until the time is over; prints what went wrong, and a summary."""
    started = time.monotonic()
    endings: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    case = first
    while case < end and time.monotonic() - started < seconds:
        count = min(PER_PROCESS, end - case)
        for number, ending, text in _child(folder, seed, case, count):
            case = number
            endings[ending] += 1
            if ending == "fault":
                line = "; ".join(part.strip() for part in text.strip("|").split("|")[-3:])
                faults[line] += 1
                if faults[line] <= 3:
                    print(f"case {case}: {text.replace('|', chr(10))}", flush=True)
            if time.monotonic() - started >= seconds:
                break
        case += 1
    minutes = (time.monotonic() - started) / 60
    print(f"seed {seed}, cases {first} to {case - 1}: {endings.total()} in {minutes:.1f} minutes; {dict(endings)}")
    for line, count in faults.most_common():
        print(f"{count:6} {line}")
    return 1 if faults else 0


def _child(folder: Path, seed: int, first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """(case, ending, text) of each case; a process that hangs or dies ends with a fault."""
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, __file__, "--child", str(folder), "--seed", str(seed)]
        child = subprocess.Popen(
            [*command, "--from", str(first), "--count", str(count)], stdout=subprocess.PIPE, stderr=errors
        )
        assert child.stdout is not None
        buffer, case, limit = b"", first, 120.0
        try:
            while True:
                ready, _, _ = select.select([child.stdout], [], [], limit)
                data = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
                if not data:
                    break
                limit = CASE_SECONDS
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    number, ending, text = line.decode(errors="replace").split(" ", 2)
                    yield int(number), ending, text
                    case = int(number) + 1
            if case < first + count:
                status = "took too long" if child.poll() is None else f"died with {child.wait()}"
                errors.seek(0)
                tail = errors.read().decode(errors="replace")[-2000:].replace("\n", "|")
                yield case, "fault", f"{tail}|the process {status}"
        finally:
            child.kill()
            child.wait()


def make_models(folder: Path) -> None:
    """Small models of every kind that can be opened."""
    import gguf

    from tests.fixtures.gguf_files import write_gguf
    from tests.fixtures.models import make_rand_model
    from tests.fixtures.quantized import SCHEMES, quantize_folder
    from tests.fixtures.shards import split_in_shards

    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "intermediate": 80}
    plain = make_rand_model(folder / "plain", **sizes)  # type: ignore[arg-type]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (plain / file).unlink()
    split_in_shards(Path(shutil.copytree(plain, folder / "sharded")), 3)
    for scheme in SCHEMES:
        _, same = quantize_folder(plain, scheme)
        shutil.rmtree(same)
    for kind in ("F32", "BF16", "Q4_0", "Q5_1", "Q8_0"):
        (folder / f"gguf-{kind}").mkdir()
        kept = make_rand_model(folder / "of-32", **sizes | {"intermediate": 64})  # type: ignore[arg-type]
        write_gguf(folder / f"gguf-{kind}" / "model.gguf", kept, gguf.GGMLQuantizationType[kind])
        shutil.rmtree(kept)


def run_cases(folder: Path, seed: int, first: int, count: int) -> None:
    """Prints a line a case: number, ending, text."""
    from services.executor.backends.cpu.backend import CpuBackend
    from tests.fixtures.damage import damage, marker_of

    models = sorted(path for path in folder.iterdir() if path.is_dir())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with tempfile.TemporaryDirectory(prefix="fuzz", dir="/dev/shm") as place:
        for case in range(first, first + count):
            draw = random.Random(f"{seed} {case}")
            model = draw.choice(models)
            copy = Path(shutil.copytree(model, Path(place) / "model", symlinks=True))
            how = damage(copy, draw)
            path = next(copy.glob("*.gguf"), copy) if model.name.startswith("gguf") else copy
            began = time.process_time()
            ending, text = attempt(path, load=CpuBackend.load if draw.random() < 0.1 else None)
            if time.process_time() - began > CASE_COMPUTE:
                ending, text = "fault", f"{time.process_time() - began:.1f} seconds of computing; {text}"
            if marker_of(copy).exists():
                ending, text = "fault", "a pickle was loaded"
                marker_of(copy).rmdir()
            shutil.rmtree(copy)
            print(case, ending, f"{model.name}: {how}|{text}".encode(errors="replace").decode().replace("\n", "|"),
                  flush=True)  # fmt: skip


def attempt(path: Path, load: object = None) -> tuple[str, str]:
    """How opening ends: loaded, refused, or fault with a traceback."""
    from services.common.errors import QuireError, Reason
    from services.executor.models.checkpoint import open_checkpoint
    from services.executor.models.dequantize import to_float32
    from services.executor.models.outline import read_outline

    try:
        try:
            read_outline(str(path))
        except QuireError as error:
            check_message(error)
        checkpoint = open_checkpoint(path)
        checkpoint.formats()
        for name in checkpoint.shapes():
            to_float32(checkpoint.tensor(name))
        if load is not None:
            load(checkpoint)  # type: ignore[operator]
    except QuireError as error:
        if error.reason not in (Reason.MODEL_LOAD_FAILED, Reason.INVALID_FIELD, Reason.MODEL_NOT_FOUND):
            return "fault", f"reason {error.reason}"
        try:
            check_message(error)
        except Exception:
            return "fault", traceback.format_exc()[-3000:]
        return "refused", ""
    except BaseException:
        return "fault", traceback.format_exc(limit=-6)[-3000:]
    return "loaded", ""


def check_message(error: Exception) -> None:
    """A page at most, in letters that any protocol can carry."""
    if len(str(error).encode()) > 4_000:
        raise AssertionError("a message of more than a page")


if __name__ == "__main__":
    sys.exit(main())
