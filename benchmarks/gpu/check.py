"""Proves and times everything on the first CUDA device, in one process and at most eight minutes.

Needs torch, triton and transformers, and this source tree: no network, no other package, nothing compiled. Parts run
in the order of what matters most, each within its time; what was found is written figure by figure, so that a run that
is cut is of use. Where a part leaves the card unusable, or does not come back, the program starts anew behind it.
Exits with 1 where something is wrong or was cut short; a speed that misses its goal is only told.

    make gpu-check
    python -m benchmarks.gpu.check --out gpu.json
    python -m benchmarks.gpu.check --only "right, kernels"
    TRITON_INTERPRET=1 python -m benchmarks.gpu.check --dry
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.report import PartReport, Row, failures, read, table, write

SECONDS = 480.0
"""Of all parts together."""
GRACE = 15.0
"""Seconds in which a part whose time is over has to come back."""
CEILINGS = "ceilings"


class TimeUp(BaseException):
    """A part's time is over. Not an Exception: compilers and transformers catch those."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some figures that belong together."""

    name: str
    seconds: float
    rows: Callable[[], Iterator[Row]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="where the figures go as JSON")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all parts")
    parser.add_argument("--only", help="parts whose names begin so")
    parser.add_argument("--resume", action="store_true", help="only parts that the file lacks; it keeps the others")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU: proves the check, not the kernels")
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from benchmarks.gpu import setting as settings

    try:
        setting = settings.dry() if options.dry else settings.on_card()
    except RuntimeError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    about = _about(setting.device.name, options.dry)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n", flush=True)
    parts = [part for part in _parts(setting) if not options.only or part.name.startswith(options.only)]
    if not parts:
        parser.error(f"--only {options.only}: there is no such part")
    found = read(options.out) if options.resume else []
    ends_at = time.monotonic() + options.seconds

    def keep(report: PartReport) -> None:
        write(options.out, about, [*found, report])

    def start_anew() -> None:
        rest = ["--resume", "--out", str(options.out), "--seconds", str(max(ends_at - time.monotonic(), 0.0))]
        rest += ["--only", options.only] if options.only else []
        print("gpu-check: starts anew", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu.check", *rest])

    done = {report.part for report in found}
    for part in parts:
        if part.name in done and part.name != CEILINGS:
            continue
        found = [report for report in found if report.part != part.name]  # ceilings are needed anew
        # On a CPU a part takes what it takes.
        most = min(options.seconds if options.dry else part.seconds, ends_at - time.monotonic())
        found.append(run_part(part, most, keep, start_anew))
        print(table(found[-1:]), flush=True)
        if part.name != CEILINGS and not _is_usable(setting.place):
            start_anew()
    wrong = failures(found)
    print(f"\n{table(found)}\n\n{'all is right' if not wrong else f'{wrong} wrong or cut short'}; {options.out}")
    return 1 if wrong else 0


def _parts(setting: Any) -> list[Part]:
    # Imported here: they import triton, whose interpreter has to be chosen before.
    from benchmarks.gpu.ceilings import Ceilings
    from benchmarks.gpu.equality import equality
    from benchmarks.gpu.time_kernels import time_attention, time_fused, time_products
    from benchmarks.gpu.time_models import time_large_alone, time_large_batch, time_small
    from benchmarks.gpu.verify import verify
    from benchmarks.gpu.verify_sampler import verify_sampler

    ceilings = Ceilings()
    return [
        Part(CEILINGS, 20, lambda: ceilings.measure(setting)),
        Part("right, kernels", 110, lambda: verify(setting)),
        Part("right, sampler", 25, lambda: verify_sampler(setting)),
        Part("right, models", 75, lambda: equality(setting)),
        Part("speed, attention", 40, lambda: time_attention(setting, ceilings)),
        Part("speed, 4 and 8 bits", 60, lambda: time_products(setting)),
        Part("speed, large model alone", 75, lambda: time_large_alone(setting, ceilings)),
        Part("speed, fused", 30, lambda: time_fused(setting, ceilings)),
        Part("speed, small model", 45, lambda: time_small(setting)),
        Part("speed, large model in batches", 90, lambda: time_large_batch(setting)),
    ]


def run_part(
    part: Part, seconds: float, keep: Callable[[PartReport], None], start_anew: Callable[[], None]
) -> PartReport:
    """What it found until it ended, failed, or had no time left; `keep` has all of it at any time.

    `start_anew` is called from another thread where the part does not come back: a kernel that never ends, say.
    """
    started = time.monotonic()
    rows: list[Row] = []

    def report(ended_by: str) -> PartReport:
        found = PartReport(part.name, time.monotonic() - started, rows, ended_by)
        keep(found)
        return found

    def give_up() -> None:
        report("it did not come back")
        start_anew()

    if seconds <= 0:
        return report("no time was left")
    ended_by = ""
    watch = threading.Timer(seconds + GRACE, give_up)
    watch.daemon = True
    watch.start()
    try:
        with _limit(seconds):
            for row in part.rows():
                rows.append(row)  # one by one: what came before a fault counts
                report("it was ended from outside")
    except TimeUp:
        ended_by = "its time was over"
    except Exception as error:  # whatever a compiler or a driver says: the next part may still be of use
        traceback.print_exc()
        ended_by = f"{type(error).__name__}: {error}"
    finally:
        watch.cancel()
    _let_go()
    return report(ended_by)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the main thread; what runs in native code ends first."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _let_go() -> None:
    """Memory of models that a part had."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # of a card that is lost: who asks whether it is usable hears of it
            torch.cuda.empty_cache()


def _is_usable(place: Any) -> bool:
    """Whether the device still computes; after an illegal access it refuses everything of this process."""
    import torch

    try:
        torch.zeros(1, device=place).add_(1).cpu()
    except RuntimeError:
        return False
    return True


def _about(device: str, is_dry: bool) -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "proves": "the check itself, nothing about a GPU" if is_dry else "what is written here",
    }


if __name__ == "__main__":
    sys.exit(main())
