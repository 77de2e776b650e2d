"""A bar chart of medians as SVG: one panel per figure, one bar per contestant."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

WIDTH, LABEL, BAR, GAP, TITLE, MARGIN = 720, 170, 16, 6, 26, 16
OURS_COLOR, PEER_COLOR, TEXT_COLOR = "#0b6e4f", "#9aa5b1", "#1f2933"


def bar_chart(title: str, panels: Mapping[str, Mapping[str, float]], ours: str) -> str:
    """`panels` maps a figure to values by contestant; each panel has its own scale, from 0 to its largest value."""
    parts, y = [], MARGIN + TITLE
    parts.append(_text(MARGIN, y - GAP, title, "bold", "start"))
    for name, values in panels.items():
        y += TITLE
        parts.append(_text(MARGIN, y - GAP, name, "bold", "start"))
        longest = max(values.values())
        for contestant, value in values.items():
            length = (WIDTH - LABEL - 90) * value / longest
            color = OURS_COLOR if contestant == ours else PEER_COLOR
            parts.append(_text(LABEL - GAP, y + BAR - 4, contestant, "normal", "end"))
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
            parts.append(_text(LABEL + length + GAP, y + BAR - 4, f"{value:.4g}", "normal", "start"))
            y += BAR + GAP
    height = y + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    style = f'<g font-family="sans-serif" font-size="12" fill="{TEXT_COLOR}">'
    return "\n".join([head, background, style, *parts, "</g></svg>", ""])


def _text(x: float, y: float, text: str, weight: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
