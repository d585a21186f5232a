"""The messages about write-once cells on storage nodes (decision 0085).

Cells are in *spaces*: a space has the cells of one log that one storage node keeps. Each question
has the epoch of the sender's layout (`indilog.kernel.cell_layout`). A storage node refuses a
question whose epoch is older than the newest epoch that the node knows, except for contents of
cells that the sender has applied. `indilog.wire.messages` says how to read the messages. Engines
ask for the drivers of `indilog_cells`; storage nodes answer.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final, TypeAlias

import msgspec

from indilog.wire.wire_message import WireMessage

CELLS_LISTED_MAX: Final = 4096
"""Keys in one answer."""


class CellSection(enum.IntEnum):
    """What a cell of a space holds."""

    RECORDS = 0
    """Records; its position is its place in the order of the log."""
    GENERATION = 1
    """A closed generation of the index that begins at the position."""
    CHECKPOINT = 2
    """A checkpoint of the state below the position."""


class CellKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The address of a cell in its space.

    Attributes:
        section: a `CellSection`.
        position: position in the log, from 0 on.
        part: 0, or the number of a part of a long content.
    """

    section: int
    position: int
    part: int = 0


class CellOutcome(enum.IntEnum):
    """What became of a question."""

    DONE = 0
    """The cells were written, read, trimmed or listed, or the space was sealed."""
    TAKEN = 1
    """The cell was not written: it has another content, or is trimmed."""
    UNWRITTEN = 2
    """The cell to read is unwritten."""
    TRIMMED = 3
    """The cell to read is trimmed."""
    SEALED = 4
    """The epoch of the question is too old; nothing was done."""
    ABSENT = 5
    """There is no such space: it was never opened, or was deleted, or the disk was lost."""
    DAMAGED = 6
    """The content of the cell does not match its checksum."""
    REFUSED = 7
    """The node is overloaded, its disk is full, or the disk failed. A write may have taken effect
    only if the disk failed.
    """


class CellWrite(WireMessage, frozen=True):
    """engine → storage: write `content` into a cell, unless the cell holds a content.

    A write of the content that the cell holds is `DONE`. It also repairs a damaged cell.
    Lost: resent until the deadline of the question; then its outcome is unknown.
    Repeated: the cell has that content already.
    """

    request: int
    space: str
    epoch: int
    key: CellKey
    content: bytes


class CellWanted(WireMessage, frozen=True):
    """engine → storage: asks for the content of a cell.

    Lost: resent until the deadline of the question.
    Repeated: answered again.
    """

    request: int
    space: str
    epoch: int
    key: CellKey
    is_applied: bool = False
    """The sender knows that the cell is written. Then its epoch may be too old: the content of a
    written cell is the same in all layouts. So reads continue while a layout is changed.
    """


class CellsTrim(WireMessage, frozen=True):
    """engine → storage: free the contents of all cells of a section below position `until`; none of
    these cells is written again.

    Lost: resent until the deadline of the question.
    Repeated: the cells are trimmed already.
    """

    request: int
    space: str
    epoch: int
    section: int
    until: int


class CellKeysWanted(WireMessage, frozen=True):
    """engine → storage: asks for the keys of the cells of a section that hold a content, after the
    key `after`; None: from the first one on.

    Lost: resent until the deadline of the question.
    Repeated: answered again.
    """

    request: int
    space: str
    epoch: int
    section: int
    after: CellKey | None = None


class CellsSeal(WireMessage, frozen=True):
    """engine → storage: from now on, refuse questions with a smaller epoch about a space, except
    for contents of applied cells. With `opens`, the space is created if it does not exist.

    Lost: resent until the deadline of the question.
    Repeated: sealed already.
    """

    request: int
    space: str
    epoch: int
    opens: bool = False


class CellsDrop(WireMessage, frozen=True):
    """engine → storage: delete all spaces of the folder `space` with their cells. From then on,
    questions about these spaces are answered with `ABSENT`.

    Lost: resent until the deadline of the question.
    Repeated: deleted already.
    """

    request: int
    space: str
    epoch: int = 0


class CellAnswer(WireMessage, frozen=True):
    """storage → engine: the answer to a question about cells. A write that is `DONE` is on disk.

    Lost: the question is resent.
    Repeated: the second one finds no question.
    """

    promises: ClassVar[bool] = False  # the content that it confirms is on disk already
    request: int
    outcome: CellOutcome
    epoch: int = 0
    """The newest epoch of the space that the node knows."""
    content: bytes = b""
    """The content of the cell that was read."""
    listed: tuple[CellKey, ...] = ()
    """Keys in ascending order, at most `CELLS_LISTED_MAX`: fewer if there are no more."""
    floor: int = 0
    """All cells of the section below this position are trimmed, and are not listed."""
    end: int = 0
    """The position after the last cell of records that was written or trimmed."""


CellQuestion: TypeAlias = (
    CellWrite | CellWanted | CellsTrim | CellKeysWanted | CellsSeal | CellsDrop
)
