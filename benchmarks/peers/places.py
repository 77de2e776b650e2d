"""Where the peers, their models and the results are kept."""

from __future__ import annotations

import os
from pathlib import Path


def peers_folder() -> Path:
    """quire/peers below $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "peers"


def models_folder() -> Path:
    return peers_folder() / "models"


def results_folder() -> Path:
    return peers_folder() / "results"
