"""What `quire up` was asked for, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.limits import MODEL_NAME
from services.common.speculation import parse_speculation
from services.executor.models.catalogue import CATALOGUE
from services.executor.models.source import default_name
from services.executor.speculation.setting import parse_draft
from services.scheduler.aliases import parse_aliases

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model to serve: the name that clients ask for, and where its files are."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports. Executors and metrics take consecutive ones from their first."""

    grpc: int = 50051
    http: int = 8000
    scheduler: int = 50052
    kvmanager: int = 50053
    executor: int = 50054
    metrics: int = 9101

    @classmethod
    def from_base(cls, base: int) -> Ports:
        """All ports in one range that begins at `base`: a second copy beside the first needs one number."""
        return cls(
            grpc=base, http=base + 1, scheduler=base + 2, kvmanager=base + 3, executor=base + 20, metrics=base + 4
        )


@dataclass(frozen=True, slots=True)
class UpOptions:
    """All choices of one run. `executors` is the number of executors per model; spare ones hold no model yet."""

    models: tuple[ModelChoice, ...] = (ModelChoice(DEFAULT_MODEL, DEFAULT_MODEL),)
    executors: int = 1
    spare_executors: int = 1
    backend: str = "auto"
    dtype: str | None = None
    context_length: int | None = None
    draft: str | None = None
    speculation: str | None = None
    kv: str | None = None
    kv_blocks: int | None = None
    kv_disk: str | None = None
    kv_disk_size: str | None = None
    keys: str | None = None
    max_sequences: int | None = None
    max_step_tokens: int | None = None
    gap_ms: float | None = None
    gap_stretch: float | None = None
    grant_ms: float | None = None
    profile: str | None = None
    aliases: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    log_level: str = "info"
    ports: Ports = Ports()

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("--model: at least one model is needed")
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"--model: two models are named {twice[0]!r}; give them names with NAME=SOURCE")
        for alias in parse_aliases(self.aliases):
            if unknown := [member for member in alias.members if member not in names]:
                raise ValueError(f"--alias {alias.name}: no --model is named {unknown[0]!r}")
            if alias.name in names:
                raise ValueError(f"--alias {alias.name}: a model has this name")
        if self.draft is not None:
            _checked("draft", parse_draft, self.draft)
        if self.speculation is not None:
            _checked("speculation", parse_speculation, self.speculation)
        if self.executors < 1:
            raise ValueError("--executors: at least 1 per model")
        if self.spare_executors < 0:
            raise ValueError("--spare-executors: not below 0")


def _checked(flag: str, parse: Callable[[str], object], text: str) -> None:
    """Raises ValueError naming the flag where its text says nothing."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from None


def parse_model(text: str) -> ModelChoice:
    """A model from `NAME=SOURCE` or `SOURCE`; the name is then the source's last part, without `.gguf`."""
    name, separator, source = text.partition("=")
    if not separator:
        source = text
        name = default_name(source)
    if not source:
        raise ValueError(f"--model {text!r}: the source is missing; write NAME=SOURCE")
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"--model {text!r}: {name!r} is no model name (letters, digits and . _ / : -, at most 128)")
    return ModelChoice(name, absolute(source))


def absolute(source: str) -> str:
    """A local path as every process of this machine understands it; other sources as they are."""
    if source in CATALOGUE:
        return source
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
