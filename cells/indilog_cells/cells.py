"""Cells that can be written once, as an I/O interface, and what else a log keeps beside them."""

from __future__ import annotations

from typing import Protocol

from indilog_cells.index import GenerationLimits


class CellsError(Exception):
    """The cells cannot be reached, or refuse access; a write may have taken effect."""


class Cells(Protocol):
    """The cells of one log, for any number of processes.

    A cell is unwritten, written, or trimmed. It takes one content, of one writer, for ever: after a
    read returned a content, each read returns it until the cell is trimmed. A trimmed cell stays
    taken. A read returns what is there when it is called, or what was written during the call.
    """

    async def write(self, position: int, content: bytes) -> bool:
        """Write a content durably; return whether the cell took it. False: it held a content.

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
        """Free the contents of the written cells from `start` to below `end`; all cells below
        `start` are trimmed. Harmless for trimmed cells.

        Raises:
            CellsError: some of the cells may not be trimmed.
        """


class Notes(Protocol):
    """What a log derives from its cells and keeps beside them: closed generations of its index, and
    checkpoints. Each has a position as its name, and takes the first content that is written.
    """

    async def write_generation(self, start: int, content: bytes) -> None:
        """Keep the generation that begins at cell `start`, durably.

        Raises:
            CellsError: it may not be kept.
        """

    async def read_generation(self, start: int) -> bytes | None:
        """Return a generation; None: there is none (any more).

        Raises:
            CellsError: it is unknown.
        """

    async def generations(self) -> list[int]:
        """Return the first cells of all generations that are kept, ascending.

        Raises:
            CellsError: they are unknown.
        """

    async def drop_generation(self, start: int) -> None:
        """Delete a generation, if it exists; all before it are deleted.

        Raises:
            CellsError: it may still exist.
        """

    async def write_checkpoint(self, position: int, content: bytes) -> None:
        """Keep the checkpoint of the state below cell `position`, durably; then delete those before
        the last two.

        Raises:
            CellsError: it may not be kept.
        """

    async def newest_checkpoint(self) -> bytes | None:
        """Return the checkpoint with the greatest position; None: there is none.

        Raises:
            CellsError: it is unknown.
        """


class CellsAndNotes(Cells, Notes, Protocol):
    """All that a log keeps."""

    @property
    def generation_limits(self) -> GenerationLimits:
        """When generations of this log are closed, for all processes and for ever."""
