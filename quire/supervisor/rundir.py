"""The run directory: one lock, one state file and one log per run. `status` and `down` find a run through it.

A run is alive exactly while its supervisor holds the lock, so a stale file or a reused process id misleads nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KEPT_LOGS = 5


@dataclass(slots=True)
class ServiceState:
    """One service as the supervisor sees it. `state` is starting, healthy, waiting (to restart), stopping or ended."""

    name: str
    role: str
    target: str
    health_service: str
    pid: int | None = None
    state: str = "starting"
    restarts: int = 0
    last_exit: str = ""


@dataclass(slots=True)
class RunState:
    """One run. `phase` is starting, running, stopping or failed."""

    pid: int
    started_at: float
    log: str
    grpc: str
    http: str
    phase: str = "starting"
    problem: str = ""
    models: list[str] = field(default_factory=list)
    services: list[ServiceState] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunState:
        services = [ServiceState(**service) for service in data.pop("services")]
        return cls(**data, services=services)


class RunDirectory:
    """Paths and files of runs. Only the supervisor that holds the lock writes the state."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or _default_path()
        self._state = self.path / "state.json"
        self._lock = self.path / "lock"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the lock for a run. Raises BlockingIOError where another run holds it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(handle)

    def is_held(self) -> bool:
        """Whether a run is alive."""
        try:
            handle = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)

    def write(self, state: RunState) -> None:
        """Replaces the state as a whole: readers never see half of it."""
        draft = self._state.with_suffix(".new")
        draft.write_text(json.dumps(asdict(state), indent=1))
        draft.replace(self._state)

    def read(self) -> RunState | None:
        """The last run's state, alive or not."""
        try:
            return RunState.from_json(json.loads(self._state.read_text()))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def live(self) -> RunState | None:
        """The state of the run that is alive, if one is."""
        return self.read() if self.is_held() else None

    def new_log(self) -> Path:
        """A fresh log file for a run; the oldest ones go."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(self.path.glob("run-*.log"))[: -KEPT_LOGS + 1 or None]:
            old.unlink(missing_ok=True)
        path = self.path / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        path.touch(mode=0o600)
        return path


def _default_path() -> Path:
    """QUIRE_RUN_DIR, else a folder below XDG_RUNTIME_DIR or XDG_STATE_HOME."""
    if chosen := os.environ.get("QUIRE_RUN_DIR"):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "quire"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"
