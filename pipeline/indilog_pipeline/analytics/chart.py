"""A bar chart as SVG, without dependencies; `jobs` draws the results of analyses with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

_LABEL_PX_MIN: Final = 160
_CHARACTER_PX: Final = 7
_BAR_PX: Final = 480
_VALUE_PX: Final = 120
_ROW_PX: Final = 22
_HEAD_PX: Final = 56
_LABEL_CHARACTERS: Final = 90
"""Largest number of characters in a label. A longer label is cut in the middle, because labels
often differ at their ends.
"""


def bar_chart(title: str, unit: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return an SVG document with one horizontal bar for each (label, value).

    Negative values have a bar of no length.

    Args:
        title: text above the bars.
        unit: unit of the values, shown below the title.
        bars: labels and values, from top to bottom.
    """
    largest = max((value for _, value in bars), default=0.0)
    height = _HEAD_PX + _ROW_PX * max(len(bars), 1) + 12
    labels = [_cut(label) for label, _ in bars]
    label_px = max(_LABEL_PX_MIN, 16 + _CHARACTER_PX * max(map(len, labels), default=0))
    width = label_px + _BAR_PX + _VALUE_PX
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{_text(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{_text(title)}</text>',
        f'<text x="12" y="42" fill="#555555">{_text(unit)}</text>',
    ]
    if not bars:
        lines.append(f'<text x="12" y="{_HEAD_PX + 15}">There is nothing to show.</text>')
    for row, (label, (_, value)) in enumerate(zip(labels, bars, strict=True)):
        top = _HEAD_PX + row * _ROW_PX
        length = round(_BAR_PX * max(value, 0.0) / largest, 1) if largest > 0 else 0.0
        lines += [
            f'<text x="{label_px - 8}" y="{top + 15}" text-anchor="end">{_text(label)}</text>',
            f'<rect x="{label_px}" y="{top + 3}" width="{length}" height="16" fill="#3b6ea5"/>',
            f'<text x="{label_px + length + 6}" y="{top + 15}">{value:,.6g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _cut(label: str) -> str:
    """Return a label of at most `_LABEL_CHARACTERS`."""
    if len(label) <= _LABEL_CHARACTERS:
        return label
    head = _LABEL_CHARACTERS // 2
    return f"{label[:head]}…{label[head + 1 - _LABEL_CHARACTERS :]}"


def _text(text: str) -> str:
    """Return text for XML; characters that XML cannot have become `?`."""
    allowed = (c if c >= " " and c not in "\ufffe\uffff" else "?" for c in text)
    return escape("".join(allowed))
