"""The storage of one log, as an interface: cells that can be written once, and notes beside them.

`object_cells`, `chain_cells` and `owned_cells` implement it; `driver` uses it.
"""

from __future__ import annotations

from typing import Protocol

from indilog_cells.index import GenerationLimits


class CellsError(Exception):
    """The cells cannot be reached, or refuse access; a write may have taken effect nevertheless."""


class Cells(Protocol):
    """The cells of one log, for any number of processes.

    A cell is unwritten, written, or trimmed. It takes one content, of one writer: after a read has
    returned a content, each read returns this content until the cell is trimmed. A trimmed cell
    takes no further content. A read returns what is there when it is called, or what was written
    during the call.
    """

    async def write(self, position: int, content: bytes) -> bool:
        """Write a content durably; return whether the cell took it. False: the cell had a content.

        Raises:
            CellsError: the outcome is unknown.
        """

    async def read(self, position: int, *, is_applied: bool = False) -> bytes | None:
        """Return the content of a cell; None: it is unwritten; empty: it is trimmed.

        Args:
            position: the cell.
            is_applied: the caller knows that the cell was written, so any copy of it will do.

        Raises:
            CellsError: the content is unknown.
        """

    async def trim(self, start: int, end: int) -> None:
        """Free the contents of the written cells from `start` to below `end`. Harmless for trimmed
        cells. The caller has trimmed all cells below `start`.

        Raises:
            CellsError: some of the cells may not be trimmed.
        """


class Notes(Protocol):
    """What a log derives from its cells and keeps beside them: closed generations of its index, and
    checkpoints of its state. A position names each note. A note has the first content that was
    written under its name.
    """

    async def write_generation(self, start: int, content: bytes) -> None:
        """Keep the generation that begins at cell `start`, durably.

        Raises:
            CellsError: the generation may be missing.
        """

    async def read_generation(self, start: int) -> bytes | None:
        """Return a generation; None: it was not written, or is deleted.

        Raises:
            CellsError: the generation is unknown.
        """

    async def generations(self) -> list[int]:
        """Return the first cells of all generations that are kept, ascending.

        Raises:
            CellsError: they are unknown.
        """

    async def drop_generation(self, start: int) -> None:
        """Delete a generation, if it exists. The caller has deleted all generations before it.

        Raises:
            CellsError: the generation may still exist.
        """

    async def write_checkpoint(self, position: int, content: bytes) -> None:
        """Keep the checkpoint of the state below cell `position`, durably. Then delete all
        checkpoints but the newest two.

        Raises:
            CellsError: the checkpoint may be missing.
        """

    async def newest_checkpoint(self) -> bytes | None:
        """Return the checkpoint with the greatest position; None: there is none.

        Raises:
            CellsError: the checkpoint is unknown.
        """


class CellsAndNotes(Cells, Notes, Protocol):
    """The whole storage of one log."""

    @property
    def generation_limits(self) -> GenerationLimits:
        """When generations of this log are closed. All processes read the same limits, and the
        limits never change.
        """
