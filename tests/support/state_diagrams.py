"""Generates the state diagrams of the documentation from the transition tables in the code.

`python -m tests.support.state_diagrams --write` updates the documents; `tests/test_tidy.py` fails
while one differs from the code. A diagram is a Mermaid `stateDiagram-v2` between two comments,
`<!-- begin NAME -->` and `<!-- end NAME -->`. Events that lead from one state to the same next one
share an arrow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bokiflow.runs import states as runs
from indilog_compute.invocations import states as invocations

_DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Diagram:
    """A transition table, and the location of its diagram.

    Attributes:
        name: in the comments around it.
        document: that contains it.
        transitions: the next state, by state and event; the state None is before the first record.
    """

    name: str
    document: Path
    transitions: Mapping[tuple[Any, Any], StrEnum]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the diagram."""
        arrows: dict[tuple[StrEnum | None, StrEnum], list[str]] = {}
        for (state, event), following in self.transitions.items():
            arrows.setdefault((state, following), []).append(event.value)
        yield "stateDiagram-v2"
        for (state, following), events in arrows.items():
            yield f"{_node(state)} --> {_node(following)}: {', '.join(events)}"
        for state in _final(self.transitions):
            yield f"{_node(state)} --> [*]"

    def renewed(self, document: str) -> str:
        """Return the document with the diagram generated from the current code."""
        begin, end = f"<!-- begin {self.name} -->", f"<!-- end {self.name} -->"
        head, opened, rest = document.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{self.document} has no place for {self.name}: {begin} ... {end}")
        text = "\n".join(["```mermaid", *self.lines(), "```"])
        return f"{head}{begin}\n{text}\n{end}{tail}"


def _node(state: StrEnum | None) -> str:
    return "[*]" if state is None else state.value.replace(" ", "_")


def _final(transitions: Mapping[tuple[Any, Any], StrEnum]) -> Iterable[StrEnum]:
    """Return the states that no event leaves, in the order of the table."""
    left = {state for state, _ in transitions}
    return dict.fromkeys(state for state in transitions.values() if state not in left)


DIAGRAMS = (
    Diagram("run states", _DOCS / "libs" / "bokiflow.md", runs.TRANSITIONS),
    Diagram("invocation states", _DOCS / "ARCHITECTURE.md", invocations.TRANSITIONS),
)


def main() -> None:
    """Write the documents, or name the outdated ones."""
    for diagram in DIAGRAMS:
        old = diagram.document.read_text()
        new = diagram.renewed(old)
        if "--write" in sys.argv[1:]:
            diagram.document.write_text(new)
        elif old != new:
            sys.exit(f"{diagram.document} differs from the code; run this with --write")


if __name__ == "__main__":
    main()
