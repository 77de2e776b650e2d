"""Packed files: made once, found again, never used when torn, never in the way of a start."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import QuireError, Reason
from services.executor.backends.cpu import load_packed as loading
from services.executor.backends.cpu import packed_cache, packed_file
from services.executor.backends.cpu.load_packed import load_packed
from services.executor.backends.cpu.packed_cache import has_room
from services.executor.backends.cpu.packed_file import open_packed
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.models.hf import HfCheckpoint
from services.executor.models.weights import file_digest
from tests.fixtures.models import make_rand_model
from tests.unit.executor.packing_fakes import SPEC, make_checkpoint

GIB = 1 << 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_rand_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


def load(source: Path, cache: Path, wanted: str = "auto") -> PackedWeights:
    return load_packed(HfCheckpoint(source), wanted, 2, cache)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that weights are packed."""
    done: list[str] = []
    pack = loading.pack

    def counted(*args) -> None:
        done.append(threading.current_thread().name)
        pack(*args)

    monkeypatch.setattr(loading, "pack", counted)
    return done


def the_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_later_starts_map_the_file(source: Path, cache: Path, packings: list[str]) -> None:
    first, second = load(source, cache), load(source, cache)
    assert len(packings) == 1
    assert the_file(cache).name.startswith("model.auto.")
    assert second.buffer.tobytes() == first.buffer.tobytes()
    assert (second.matrices, second.vectors) == (first.matrices, first.vectors)
    assert second.formats == first.formats == "f32 x 14"
    assert second.source_digests == (file_digest(source / "model.safetensors").hex(),)
    assert second.conversions == ()
    for weights in (first, second):
        assert weights.buffer.ctypes.data % 64 == 0
        assert not weights.buffer.flags.writeable
        assert weights.mapped_bytes == weights.buffer.nbytes
        assert mapping_of(weights.buffer) == f"shared {the_file(cache)}"


def mapping_of(buffer: np.ndarray) -> str:
    """How the buffer's memory is mapped: "shared FILE" or "private"."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_, name = line.split(maxsplit=5) if len(line.split()) > 5 else [*line.split(), ""]
        low, high = (int(number, 16) for number in span.split("-"))
        if low <= buffer.ctypes.data < high:
            return ("shared " if flags[3] == "s" else "private ") + name
    raise AssertionError("the buffer is not mapped")


def test_each_format_and_each_source_has_its_own_file(source: Path, cache: Path, packings: list[str]) -> None:
    other = make_rand_model(source.parent / "elsewhere" / "model", seed=5)
    kept = [load(source, cache), load(source, cache, "bf16"), load(other, cache)]
    again = [load(source, cache), load(source, cache, "bf16"), load(other, cache)]
    assert len(packings) == 3
    assert len(set(cache.iterdir())) == 3
    for a, b in zip(kept, again, strict=True):
        assert a.buffer.tobytes() == b.buffer.tobytes()


@pytest.mark.parametrize("change", ["content", "time", "spec"])
def test_a_changed_checkpoint_is_packed_anew_and_the_old_file_goes(
    source: Path, cache: Path, packings: list[str], change: str
) -> None:
    load(source, cache)
    old, others = the_file(cache), [cache / "model.bf16.0123456789abcdef.x.packed", cache / "mode.auto.0.y.packed"]
    for path in others:
        path.touch()
    weights = source / "model.safetensors"
    if change == "content":
        make_rand_model(source, seed=3)
    elif change == "time":
        os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    else:
        config = source / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    found = load(source, cache)
    assert len(packings) == 2
    assert not old.exists()
    assert all(path.exists() for path in others)
    assert len(list(cache.iterdir())) == 3
    assert found.source_digests == (file_digest(weights).hex(),)


@pytest.mark.parametrize("fault", ["empty", "cut in the header", "cut in the buffer", "cut in the mark", "longer",
                                   "contents", "mark", "another's mark", "magic", "version"])  # fmt: skip
def test_a_torn_file_is_made_anew(source: Path, cache: Path, packings: list[str], fault: str) -> None:
    whole = load(source, cache).buffer.tobytes()
    path = the_file(cache)
    data = bytearray(path.read_bytes())
    cuts = {"empty": 0, "cut in the header": 30, "cut in the buffer": len(data) // 2, "cut in the mark": -1}
    spots = {"contents": 200, "mark": -10, "another's mark": -1, "magic": 0, "version": 8}
    if fault in cuts:
        data = data[: cuts[fault]]
    elif fault in spots:
        data[spots[fault]] ^= 1
    else:
        data += b"\0"
    path.unlink()  # the mapping of the first start keeps its own
    path.write_bytes(data)
    assert open_packed(path) is None
    assert load(source, cache).buffer.tobytes() == whole
    assert len(packings) == 2
    assert open_packed(the_file(cache)) is not None


def test_a_file_of_another_version_is_not_read(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(source, cache)
    path = the_file(cache)
    monkeypatch.setattr(packed_file, "VERSION", packed_file.VERSION + 1)
    assert open_packed(path) is None
    assert open_packed(cache / "none") is None


def test_starts_at_the_same_time_pack_once(
    source: Path, cache: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack, waiting = loading.pack, threading.Event()
    caplog.set_level(logging.INFO, "quire.executor")

    def slow(*args) -> None:
        assert waiting.wait(30)
        pack(*args)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                waiting.set()

    monkeypatch.setattr(loading, "pack", slow)
    listener = Listener()
    logging.getLogger("quire.executor").addHandler(listener)
    found: list[PackedWeights] = []
    threads = [threading.Thread(target=lambda: found.append(load(source, cache))) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        logging.getLogger("quire.executor").removeHandler(listener)
    assert len(packings) == 1
    assert len({weights.buffer.tobytes() for weights in found}) == 1
    assert len(found) == 3
    assert the_file(cache).suffix == ".packed"


def test_what_a_killed_process_left_is_no_hindrance(source: Path, cache: Path, packings: list[str]) -> None:
    program = f"""
import time
from pathlib import Path
from services.executor.backends.cpu import load_packed as loading
from services.executor.models.hf import HfCheckpoint

def stuck(checkpoint, plan, buffer, threads):
    buffer[:] = 7
    print("packing", flush=True)
    time.sleep(600)

loading.pack = stuck
loading.load_packed(HfCheckpoint(Path({str(source)!r})), "auto", 1, Path({str(cache)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "packing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert the_file(cache).suffix == ".partial"
    left_by_an_older_state = cache / the_file(cache).name.replace(".packed.partial", "0.packed.partial")
    left_by_an_older_state.write_bytes(b"x")
    weights = load(source, cache)
    assert packings == [threading.current_thread().name]
    assert the_file(cache).suffix == ".packed"
    assert weights.buffer.tobytes() == load(source, cache.parent / "other").buffer.tobytes()


def unwritable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("no folder")


def full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)


def nearly_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "has_room", lambda size, free, total: False)


@pytest.mark.parametrize("fault", [unwritable, full, nearly_full], ids=lambda fault: fault.__name__)
def test_without_a_cache_weights_are_packed_into_memory(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault
) -> None:
    expected = load(source, cache.parent.parent / "usable")
    fault(cache, monkeypatch)
    with caplog.at_level(logging.WARNING, "quire.executor"):
        weights = load(source, cache)
    assert weights.buffer.tobytes() == expected.buffer.tobytes()
    assert (weights.matrices, weights.source_digests) == (expected.matrices, expected.source_digests)
    assert mapping_of(weights.buffer) == "private "
    assert weights.mapped_bytes == 0
    assert weights.buffer.ctypes.data % 64 == 0
    assert not weights.buffer.flags.writeable
    assert [record.getMessage() for record in caplog.records] == ["packed weights cannot be kept"]
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("size", "free", "total", "room"),
    [
        (GIB, 3 * GIB, 100 * GIB, True),
        (GIB, 2 * GIB, 100 * GIB, True),
        (GIB, 2 * GIB - 1, 100 * GIB, False),
        (100, 150, 1000, True),
        (100, 149, 1000, False),
        (200, 100, 1000, False),
    ],
)
def test_a_disk_is_not_filled(size: int, free: int, total: int, room: bool) -> None:
    assert has_room(size, free, total) is room


def test_a_checkpoint_that_changes_meanwhile_is_refused(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = loading.pack

    def pack_and_change(*args) -> None:
        pack(*args)
        os.utime(source / "model.safetensors")

    monkeypatch.setattr(loading, "pack", pack_and_change)
    with pytest.raises(QuireError, match=r"model\.safetensors changed") as error:
        load(source, cache)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED
    assert list(cache.iterdir()) == []


def test_refused_weights_leave_no_file(source: Path, cache: Path) -> None:
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(data)
    for _ in range(2):
        with pytest.raises(QuireError, match=r"tensor \S+ holds NaN or infinity"):
            load(source, cache)
    assert list(cache.iterdir()) == []


def test_the_cache_lies_beside_the_models(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packings: list[str]
) -> None:
    monkeypatch.delenv("QUIRE_DERIVED")
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_packed(HfCheckpoint(source), "auto", 1)
    assert the_file(tmp_path / "quire" / "packed").name.startswith("model.auto.")


def test_packing_into_a_file_takes_little_memory(tmp_path: Path, cache: Path) -> None:
    checkpoint = make_checkpoint(replace(SPEC, vocab_size=60_000))
    file = tmp_path / "weights"
    file.write_bytes(b"any")
    checkpoint.files = lambda: [file]
    tracemalloc.start()
    try:
        weights = load_packed(checkpoint, "q8", 2, cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weights.buffer.nbytes > 12_000_000
    assert peak < 8_000_000


@pytest.mark.full
def test_anonymous_memory_stays_small_whatever_the_size(tmp_path: Path, cache: Path) -> None:
    """A model of 250 MB, from the kernel's own count: all that packing maps or allocates."""
    program = f"""
import threading
from pathlib import Path
from services.executor.backends.cpu.load_packed import load_packed
from services.executor.models.hf import HfCheckpoint

def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10

checkpoint = HfCheckpoint(Path({str(tmp_path / "large")!r}))
before, most, done = anonymous(), 0, threading.Event()

def watch() -> None:
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
weights = load_packed(checkpoint, "bf16", 2, Path({str(cache)!r}))
done.set()
watcher.join()
print(weights.buffer.nbytes, before, most)
"""
    make_rand_model(tmp_path / "large", layers=8, hidden=1024, heads=16, kv_heads=4, head_size=64, intermediate=4096)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, before, most = map(int, run.stdout.split())
    assert size > 200_000_000
    assert before < most < before + 0.15 * size


def test_loading_imports_no_torch(source: Path, cache: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from services.executor.backends.cpu.load_packed import load_packed
from services.executor.models.checkpoint import open_checkpoint

for _ in range(2):
    load_packed(open_checkpoint(Path({str(source)!r})), "auto", 1, Path({str(cache)!r}))
    print(*(name for name in ("torch", "transformers") if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "\n\n"
