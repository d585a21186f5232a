"""Cells as objects of a store, one object each (docs/FORMATS.md, "Logs in an object store").

An object store limits requests per prefix, so the cells of a log are spread over `stripes` folders:
cell p is in folder p modulo `stripes`. An object named `LOG` has the number of stripes, and the
limits at which generations of the index are closed. It is written once, before the first cell.

This is the storage (`cells`) of logs of kind `object-store`, over an `ObjectStore`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import msgspec

from indilog.base.errors import DataDirectoryError, DataLossError
from indilog.base.log_kinds import STRIPES
from indilog_cells.cells import CellsError
from indilog_cells.index import GENERATION_LIMITS, GenerationLimits
from indilog_cells.object_store import ObjectStore

_VERSION: Final = 1
_LOG: Final = "LOG"
_CHECKPOINTS_KEPT: Final = 2
_REPLACED_MAX: Final = 4
"""How often one call starts again because the newest checkpoint was replaced."""


class _LogNote(msgspec.Struct, frozen=True):
    version: int
    stripes: int
    generation_records: int
    generation_cells: int


class ObjectCells:
    """The cells and notes of one log: a `CellsAndNotes`.

    Args:
        store: the store.
        folder: folder of the log in the store.
        stripes: folders of the cells.
        generation_limits: when generations of the index are closed.

    Attributes:
        requests: number of requests to the store, by kind: `create`, `get`, `list`, `replace`,
            `delete`.
    """

    def __init__(
        self, store: ObjectStore, folder: str, stripes: int, generation_limits: GenerationLimits
    ) -> None:
        self._store, self._folder, self._stripes = store, folder, stripes
        self.generation_limits = generation_limits
        self.requests: Counter[str] = Counter()

    @classmethod
    async def created(
        cls,
        store: ObjectStore,
        folder: str,
        *,
        stripes: int = STRIPES,
        generation_limits: GenerationLimits = GENERATION_LIMITS,
    ) -> ObjectCells:
        """Create a log with these stripes and limits, unless it exists; return its cells.

        Args:
            store: see `ObjectCells`.
            folder: see `ObjectCells`.
            stripes: those of a new log; an existing one keeps its own.
            generation_limits: those of a new log; an existing one keeps its own.

        Raises:
            CellsError: the store cannot be reached.
            DataDirectoryError: the log was written by another version.
        """
        note = _LogNote(_VERSION, stripes, *generation_limits)
        await store.create(f"{folder}/{_LOG}", msgspec.json.encode(note))
        return await cls.opened(store, folder)

    @classmethod
    async def opened(cls, store: ObjectStore, folder: str) -> ObjectCells:
        """Return the cells of a log that was created.

        An absent log is not created again: the place may be empty because it is not mounted or was
        deleted, and a new log would give seqnums again that were acknowledged.

        Args:
            store: see `ObjectCells`.
            folder: see `ObjectCells`.

        Raises:
            CellsError: the store cannot be reached.
            DataDirectoryError: the log was written by another version.
            DataLossError: the store does not have the log.
        """
        name = f"{folder}/{_LOG}"
        if (note := await store.get(name)) is None:
            raise DataLossError(
                f"The object store has no {name}; see that its place is the right one and mounted, "
                "or restore a backup."
            )
        try:
            found = msgspec.json.decode(note, type=_LogNote)
        except msgspec.MsgspecError as error:
            raise DataDirectoryError(f"{name} is damaged; restore it from a copy.") from error
        if found.version != _VERSION or found.stripes < 1:
            raise DataDirectoryError(
                f"The log {folder} has format {found.version}; this version reads {_VERSION}."
            )
        limits = GenerationLimits(found.generation_records, found.generation_cells)
        return cls(store, folder, found.stripes, limits)

    def _cell(self, position: int) -> str:
        return f"{self._folder}/cells/{position % self._stripes:04d}/{position:020d}"

    async def write(self, position: int, content: bytes) -> bool:
        """See `Cells.write`."""
        self.requests["create"] += 1
        return await self._store.create(self._cell(position), content)

    async def read(self, position: int, *, is_applied: bool = False) -> bytes | None:
        """See `Cells.read`; there is one copy."""
        del is_applied
        self.requests["get"] += 1
        return await self._store.get(self._cell(position))

    async def trim(self, start: int, end: int) -> None:
        """See `Cells.trim`. Empty objects replace the cells, so no writer writes them again."""
        for position in range(start, end):
            self.requests["replace"] += 1
            await self._store.replace(self._cell(position), b"")

    async def release(self) -> None:
        """Delete what is kept of a log that no process of the platform uses any more. Harmless for
        a released log.

        The cells become empty objects, as after a trim. So a process that left the platform takes
        no cell for an unwritten one, and finds no checkpoint to continue from.

        Raises:
            CellsError: some contents may be left.
        """
        for stripe in range(self._stripes):
            folder = f"{self._folder}/cells/{stripe:04d}"
            for name in await self._store.names(folder):
                await self._store.replace(f"{folder}/{name}", b"")
        for notes in ("index", "checkpoints"):
            await self._store.delete_folder(f"{self._folder}/{notes}")

    # --- notes

    def _generation(self, start: int) -> str:
        return f"{self._folder}/index/{start:020d}"

    async def write_generation(self, start: int, content: bytes) -> None:
        """See `Notes.write_generation`."""
        self.requests["create"] += 1
        await self._store.create(self._generation(start), content)

    async def read_generation(self, start: int) -> bytes | None:
        """See `Notes.read_generation`."""
        self.requests["get"] += 1
        return await self._store.get(self._generation(start))

    async def generations(self) -> list[int]:
        """See `Notes.generations`."""
        self.requests["list"] += 1
        names = await self._store.names(f"{self._folder}/index")
        return [int(name) for name in names if re.fullmatch(r"\d{20}", name)]

    async def drop_generation(self, start: int) -> None:
        """See `Notes.drop_generation`."""
        self.requests["delete"] += 1
        await self._store.delete(self._generation(start))

    def _checkpoint(self, name: str) -> str:
        return f"{self._folder}/checkpoints/{name}"

    async def _checkpoints(self) -> list[str]:
        self.requests["list"] += 1
        names = await self._store.names(f"{self._folder}/checkpoints")
        return [name for name in names if re.fullmatch(r"\d{20}", name)]

    async def write_checkpoint(self, position: int, content: bytes) -> None:
        """See `Notes.write_checkpoint`."""
        self.requests["create"] += 1
        await self._store.create(self._checkpoint(f"{position:020d}"), content)
        for name in (await self._checkpoints())[:-_CHECKPOINTS_KEPT]:
            self.requests["delete"] += 1
            await self._store.delete(self._checkpoint(name))

    async def newest_checkpoint(self) -> bytes | None:
        """See `Notes.newest_checkpoint`."""
        for _ in range(_REPLACED_MAX):
            if not (names := await self._checkpoints()):
                return None
            self.requests["get"] += 1
            if (found := await self._store.get(self._checkpoint(names[-1]))) is not None:
                return found
        raise CellsError("the newest checkpoint is replaced repeatedly")
