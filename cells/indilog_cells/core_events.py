"""The events that a core gets from its driver, and the effects that it wants.

`indilog_cells.core` returns the effects, `indilog_cells.driver` performs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from indilog_cells.state import Closed, Outcome

# --- events


class TokenGiven(NamedTuple):
    """The sequencer gave a cell. `begins_tenure`: this process has become the owner of the log."""

    position: int
    begins_tenure: bool = False


class TokenFailed(NamedTuple):
    """No cell was given; it is asked for again."""


class AppendsElsewhere(NamedTuple):
    """No cell was given, because another process appends to the log: its owner."""

    owner: str


class CellWritten(NamedTuple):
    """The cell took this content, that of a `WriteCell`."""

    position: int
    content: bytes


class CellTaken(NamedTuple):
    """The cell refused the content of a `WriteCell`, because it holds a content or is trimmed."""

    position: int


class CellRead(NamedTuple):
    """The content of a cell, as bytes; None: it was unwritten. Empty: it is trimmed."""

    position: int
    content: bytes | None


class CellFailed(NamedTuple):
    """A request failed; a write may have taken effect."""

    position: int
    is_write: bool


class CellDeposed(NamedTuple):
    """A content was not written, or not completely, because another process owns the log now."""

    position: int


class ContentAnswered(NamedTuple):
    """The owner has appended a content; None: its outcome is unknown, and that owner never appends
    it later.
    """

    serial: int
    outcomes: Sequence[Outcome] | None


Event: TypeAlias = (
    TokenGiven
    | TokenFailed
    | AppendsElsewhere
    | CellWritten
    | CellTaken
    | CellRead
    | CellFailed
    | CellDeposed
    | ContentAnswered
)

# --- effects


class AskToken(NamedTuple):
    """Ask the sequencer for a cell; all cells below `at_least` are written."""

    at_least: int


class WriteCell(NamedTuple):
    """Write a content into a cell, unless it holds one."""

    position: int
    content: bytes


class ReadCell(NamedTuple):
    """Read a cell."""

    position: int


class SendContent(NamedTuple):
    """Let the owner append a content; `ContentAnswered` has the outcomes."""

    owner: str
    serial: int
    content: bytes


class ItemApplied(NamedTuple):
    """A submitted item has its outcome; None: the outcome is unknown."""

    ticket: int
    outcome: Outcome | None


class ContentApplied(NamedTuple):
    """The content of another process has the outcomes of its items; None: they are unknown, and
    this core does not append it any more.
    """

    ticket: int
    outcomes: Sequence[Outcome] | None


class CaughtUp(NamedTuple):
    """All appends that were complete when `Core.catch_up` was called are applied."""

    ticket: int


class FellBehind(NamedTuple):
    """The next cell was trimmed: continue from a newer checkpoint (`Core.restart`)."""


Effect: TypeAlias = (
    AskToken
    | WriteCell
    | ReadCell
    | SendContent
    | ItemApplied
    | ContentApplied
    | CaughtUp
    | FellBehind
    | Closed
)
