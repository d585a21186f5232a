"""Draws the sequence and state diagrams of the documentation as SVG, for the site.

The text of a diagram is Mermaid's, so code hosts draw it too. Of Mermaid's language it may use:
`sequenceDiagram`, `participant NAME as TITLE`, `A->>B: text` (a message), `A-->>B: text` (an
answer), `Note over A,B: text`; or `stateDiagram-v2` with arrows `A --> B: events`, `[*] --> A:
event` and `A --> [*]`. A state diagram has a column for each state and a row for each arrow.
Mermaid itself is not used on the site: its 3 MB of JavaScript would have to come from somewhere.
"""

from __future__ import annotations

import html
import re

_COLUMN = 190
_ROW = 44
_MARGIN = 90
_ARROW = re.compile(r"(\w+)\s*(--?>>)\s*(\w+)\s*:\s*(.+)")
_NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?\s*:\s*(.+)")
_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
_TRANSITION = re.compile(r"(\w+|\[\*\])\s*-->\s*(\w+|\[\*\])(?:\s*:\s*(.+))?")


def fence(source: str, *_: object, **__: object) -> str:
    """Return a diagram as SVG inside a figure: the formatter of ` ```mermaid ` fences."""
    return f'<figure class="sequence">{svg(source)}</figure>'


def svg(source: str) -> str:
    """Return a diagram as SVG.

    Raises:
        ValueError: a line is none of those that are drawn.
    """
    lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    if lines and lines[0] == "stateDiagram-v2":
        lines = _as_sequence(lines)
    if not lines or lines[0] != "sequenceDiagram":
        raise ValueError("A diagram begins with `sequenceDiagram` or `stateDiagram-v2`.")
    columns: dict[str, int] = {}
    heads: list[str] = []
    body: list[str] = []
    y = 70
    for line in lines[1:]:
        if found := _PARTICIPANT.fullmatch(line):
            columns[found[1]] = x = _MARGIN + _COLUMN * len(columns)
            heads.append(_head(x, found[2] or found[1]))
        elif found := _ARROW.fullmatch(line):
            body.append(_message(columns[found[1]], columns[found[3]], y, found[4], found[2]))
            y += _ROW
        elif found := _NOTE.fullmatch(line):
            first = columns[found[1]]
            body.append(_note(first, columns[found[2]] if found[2] else first, y, found[3]))
            y += _ROW
        else:
            raise ValueError(f"This line of a diagram is not drawn: {line!r}")
    width = 2 * _MARGIN + _COLUMN * (len(columns) - 1)
    dots = "stroke-dasharray='3 4' opacity='.5'"
    lifelines = [_line(x, 40, x, y - 10, dots) for x in columns.values()]
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {y}' role='img' "
        f"width='{width}' style='max-width:100%;height:auto' font-family='inherit' "
        f"font-size='13' fill='currentColor' stroke='currentColor'>"
        + "".join([*lifelines, *heads, *body])
        + "</svg>"
    )


def _as_sequence(lines: list[str]) -> list[str]:
    """Return a state diagram as a sequence diagram; its start and end are columns of their own."""
    columns: dict[str, str] = {}
    arrows: list[str] = []
    for line in lines[1:]:
        if (found := _TRANSITION.fullmatch(line)) is None:
            raise ValueError(f"This line of a diagram is not drawn: {line!r}")
        start = "begin" if found[1] == "[*]" else found[1]
        end = "end" if found[2] == "[*]" else found[2]
        columns |= {name: name.replace("_", " ") for name in (start, end)}
        arrows.append(f"{start}->>{end}: {found[3] or 'final'}")
    order = sorted(columns, key=lambda name: name == "end")  # a stable sort: the end goes last
    titles = [f"participant {name} as {columns[name]}" for name in order]
    return ["sequenceDiagram", *titles, *arrows]


def _line(x1: int, y1: int, x2: int, y2: int, style: str = "") -> str:
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' {style}/>"


def _text(x: int, y: int, text: str) -> str:
    return f"<text x='{x}' y='{y}' text-anchor='middle' stroke='none'>{html.escape(text)}</text>"


def _box(x: int, y: int, width: int, style: str) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='28' rx='4' {style}/>"


def _head(x: int, title: str) -> str:
    return _box(x - 80, 12, 160, "fill='none'") + _text(x, 31, title)


def _note(first: int, last: int, y: int, text: str) -> str:
    left, right = min(first, last) - 80, max(first, last) + 80
    style = "fill='currentColor' fill-opacity='.08' stroke='none'"
    return _box(left, y - 22, right - left, style) + _text((left + right) // 2, y - 3, text)


def _message(x1: int, x2: int, y: int, text: str, arrow: str) -> str:
    style = "stroke-dasharray='6 4'" if arrow == "-->>" else ""
    if x1 == x2:
        path = f"M{x1},{y - 8} h34 v12 h-28"
        turned = f"<path d='{path}' fill='none' {style}/>" + _tip(x1 + 2, y + 4, -1)
        return turned + f"<text x='{x1 + 42}' y='{y + 4}' stroke='none'>{html.escape(text)}</text>"
    way = 1 if x2 > x1 else -1
    tip = _tip(x2 - 2 * way, y, way)
    return _line(x1, y, x2 - 3 * way, y, style) + tip + _text((x1 + x2) // 2, y - 7, text)


def _tip(x: int, y: int, way: int) -> str:
    return f"<path d='M{x},{y} l{-8 * way},-4 v8 z'/>"
