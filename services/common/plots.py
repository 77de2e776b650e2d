"""Whether a picture can be drawn, asked before the work that it is to show begins."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import invalid


def check_plot(path: Path) -> None:
    """Raises INVALID_FIELD, for --plot, where matplotlib is missing or no such file can be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise invalid("--plot", "needs matplotlib: pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise invalid("--plot", f"{path}: the name must end with one of {', '.join(sorted(known))}")
    if not path.absolute().parent.is_dir():
        raise invalid("--plot", f"{path}: no such folder")
