"""The build backend: scikit-build-core, which also generates quire/v1 and knows a plain kind of editable install.

A wheel compiles the native module in a folder of its own. An editable install is one path entry: nothing is hooked
into the interpreter's start, and the module is compiled into kernels/, as `make native` does.
"""

from __future__ import annotations

import build_native
import build_protos
from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str]
PATH_ENTRY = build_native.ROOT / "build" / "quire.pth"
# Of the wheel, an editable install has the metadata and the scripts.
EDITABLE: Settings = {
    "wheel.cmake": "false",
    "wheel.packages": [],
    f"wheel.force-include.{PATH_ENTRY}": PATH_ENTRY.name,
}


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    build_protos.generate(build_protos.ROOT)
    return build.build_wheel(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(config_settings), "cmake>=3.25", "ninja"]


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return build.prepare_metadata_for_build_wheel(metadata_directory, {**(config_settings or {}), **EDITABLE})


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    build_protos.generate(build_protos.ROOT)
    build_native.build()
    PATH_ENTRY.write_text(f"{build_native.ROOT}\n")
    return build.build_wheel(wheel_directory, {**(config_settings or {}), **EDITABLE}, metadata_directory)
