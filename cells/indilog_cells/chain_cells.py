"""Cells on storage nodes, replicated by chains that the clients drive (decision 0085; CORFU 2).

A writer writes a content to the replicas of its chain in order. The first replica (the head)
decides which content a cell gets, because it takes only the first content that arrives. A write is
complete when the last replica has the content. A reader that does not know whether a cell is
written asks the last replica. If the last replica lacks the content and another replica has it, the
reader completes the write before it returns the content: otherwise a later read could miss it.

Each question has the epoch of the asker's layout. After a change of the layout, at least one
replica of each chain refuses smaller epochs. A cell counts as unwritten only if all replicas of its
chain say so. So an asker with an old layout is refused, and no leases are needed. Only a cell that
the asker has applied is read in any epoch, because its content never changes.

The layout is changed by `chain_upkeep`. `owned_cells` builds on this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from indilog.kernel.cell_layout import CellLayout, CellReplica, Chain
from indilog.wire.cell_messages import (
    CELLS_LISTED_MAX,
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellQuestion,
    CellSection,
    CellsTrim,
    CellWanted,
    CellWrite,
)
from indilog_cells.cells import CellsError
from indilog_cells.index import GENERATION_LIMITS, GenerationLimits
from indilog_cells.layout_changes import CellNodes, Layouts

_CHANGES_MAX: Final = 4
"""How often one call starts again because the layout, or the newest checkpoint, was replaced."""
_CHECKPOINTS_KEPT: Final = 2
_WHOLE, _PARTS = b"\0", b"\1"
"""First byte of a note, before its content (`_WHOLE`) or the numbers of its parts (`_PARTS`)."""


class LayoutSealedError(CellsError):
    """A replica refuses the epoch of the layout."""

    def __init__(self) -> None:
        super().__init__("the layout of the log is being changed")


class ChainCells:
    """The cells and notes of one log: a `CellsAndNotes`.

    Args:
        nodes: the storage nodes.
        layouts: the layouts of the log.
        part_bytes: largest number of bytes of a note in one cell; a longer note has several parts.
        new_part: returns a number from 1 on for a part of a note; no other part has this number.
        generation_limits: when generations of the index are closed.
    """

    def __init__(
        self,
        nodes: CellNodes,
        layouts: Layouts,
        *,
        part_bytes: int,
        new_part: Callable[[], int],
        generation_limits: GenerationLimits = GENERATION_LIMITS,
    ) -> None:
        self._nodes = nodes
        self._layouts = layouts
        self._part_bytes = part_bytes
        self._new_part = new_part
        self.generation_limits = generation_limits

    # --- cells

    async def write(self, position: int, content: bytes) -> bool:
        """See `Cells.write`."""
        return await self._write(CellKey(CellSection.RECORDS, position), content)

    async def read(self, position: int, *, is_applied: bool = False) -> bytes | None:
        """See `Cells.read`."""
        return await self._read(CellKey(CellSection.RECORDS, position), is_applied=is_applied)

    async def trim(self, start: int, end: int) -> None:
        """See `Cells.trim`."""
        del start  # all cells below it are trimmed
        await self._trim(CellSection.RECORDS, end)

    async def complete(self, key: CellKey) -> None:
        """If a replica has the content of a cell, copy the content to all replicas.

        Raises:
            CellsError: a replica may lack the content.
        """
        await self._read(key)

    async def _write(self, key: CellKey, content: bytes) -> bool:
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            try:
                return await self._write_along(layout, key, content)
            except CellsError as error:
                await self._follow(layout, error)
        raise CellsError("the layout of the log changes too often")

    async def _write_along(self, layout: CellLayout, key: CellKey, content: bytes) -> bool:
        """Write to the replicas of a chain in order; return whether all have this content. False:
        the cell has another content.
        """
        for replica in layout.chain(key.position):
            question = CellWrite(0, replica.space, layout.epoch, key, content)
            answer = await self._ask(replica, question)
            if answer.outcome is not CellOutcome.DONE:
                if answer.outcome is CellOutcome.TAKEN:
                    return False
                raise _failure(replica, answer)
        return True

    async def _read(self, key: CellKey, *, is_applied: bool = False) -> bytes | None:
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            try:
                if is_applied and (found := await self._read_any(layout, key)) is not None:
                    return found
                return await self._read_last(layout, key)
            except CellsError as error:
                await self._follow(layout, error)
        raise CellsError("the layout of the log changes too often")

    async def _read_any(self, layout: CellLayout, key: CellKey) -> bytes | None:
        """Return the copy of one replica. None: no replica has one. The replica that is asked first
        depends on the cell, which spreads the reads.
        """
        chain = layout.chain(key.position)
        first = key.position // len(layout.chains) % len(chain)
        for replica in (*chain[first:], *chain[:first]):
            question = CellWanted(0, replica.space, layout.epoch, key, is_applied=True)
            (answer,) = await self._nodes.ask_all([(replica.node, question)])
            if answer is not None and answer.outcome in (CellOutcome.DONE, CellOutcome.TRIMMED):
                return answer.content
        return None

    async def _read_last(self, layout: CellLayout, key: CellKey) -> bytes | None:
        """Return the content that the last replica has. If it has none, ask all other replicas; if
        one of these has a content, complete its write and return it.
        """
        *others, last = layout.chain(key.position)
        answer = await self._ask(last, CellWanted(0, last.space, layout.epoch, key))
        if answer.outcome in (CellOutcome.DONE, CellOutcome.TRIMMED):
            return answer.content
        if answer.outcome not in (CellOutcome.UNWRITTEN, CellOutcome.DAMAGED):
            raise _failure(last, answer)
        asks = [(r.node, CellWanted(0, r.space, layout.epoch, key)) for r in others]
        answers = [answer, *(await self._nodes.ask_all(asks))] if asks else [answer]
        outcomes = {None if found is None else found.outcome for found in answers}
        if CellOutcome.SEALED in outcomes:
            raise LayoutSealedError
        if CellOutcome.TRIMMED in outcomes:
            return b""
        for found in answers:
            if found is not None and found.outcome is CellOutcome.DONE:
                if await self._write_along(layout, key, found.content):
                    return found.content
                raise CellsError(f"cell {key.position} was trimmed meanwhile")
        if outcomes == {CellOutcome.UNWRITTEN}:
            return None
        raise CellsError(f"cell {key.position} cannot be read from {_names([*others, last])}")

    async def _trim(self, section: CellSection, until: int) -> None:
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            asks = [
                (node, CellsTrim(0, space, layout.epoch, section, until))
                for node, space in sorted(layout.replicas)
            ]
            answers = await self._nodes.ask_all(asks)
            if all(each is not None and each.outcome is CellOutcome.DONE for each in answers):
                return
            await self._follow(layout, CellsError("a storage node cannot trim now"))
        raise CellsError("the layout of the log changes too often")

    async def _follow(self, layout: CellLayout, error: CellsError) -> None:
        """Learn the layout after `layout`, because a call failed: a replica may be replaced.

        Raises:
            CellsError: no layout follows (then it is `error`), or the layout cannot be read.
        """
        if self._layouts.layout.epoch == layout.epoch:
            await self._layouts.renew()
        if self._layouts.layout.epoch == layout.epoch:
            raise error

    async def _ask(self, replica: CellReplica, question: CellQuestion) -> CellAnswer:
        (answer,) = await self._nodes.ask_all([(replica.node, question)])
        if answer is None:
            raise CellsError(f"{replica.node} does not answer")
        if answer.outcome is CellOutcome.SEALED:
            raise LayoutSealedError
        return answer

    # --- notes

    async def write_generation(self, start: int, content: bytes) -> None:
        """See `Notes.write_generation`."""
        await self._write_note(CellKey(CellSection.GENERATION, start), content)

    async def read_generation(self, start: int) -> bytes | None:
        """See `Notes.read_generation`."""
        return await self._read_note(CellKey(CellSection.GENERATION, start))

    async def generations(self) -> list[int]:
        """See `Notes.generations`."""
        return await self._notes(CellSection.GENERATION)

    async def drop_generation(self, start: int) -> None:
        """See `Notes.drop_generation`."""
        await self._trim(CellSection.GENERATION, start + 1)

    async def write_checkpoint(self, position: int, content: bytes) -> None:
        """See `Notes.write_checkpoint`."""
        await self._write_note(CellKey(CellSection.CHECKPOINT, position), content)
        kept = (await self._notes(CellSection.CHECKPOINT))[-_CHECKPOINTS_KEPT:]
        await self._trim(CellSection.CHECKPOINT, kept[0])

    async def newest_checkpoint(self) -> bytes | None:
        """See `Notes.newest_checkpoint`."""
        for _ in range(_CHANGES_MAX):
            if not (positions := await self._notes(CellSection.CHECKPOINT)):
                return None
            key = CellKey(CellSection.CHECKPOINT, positions[-1])
            if (found := await self._read_note(key)) is not None:
                return found
        raise CellsError("the newest checkpoint is replaced repeatedly")

    async def _write_note(self, key: CellKey, content: bytes) -> None:
        """Write a note, unless a note has this key. Its parts are written first; parts of a note
        that was not written are trimmed together with the note that was.
        """
        note = _WHOLE + content
        if len(content) > self._part_bytes:
            parts = []
            for start in range(0, len(content), self._part_bytes):
                parts.append(self._new_part())
                part = msgspec.structs.replace(key, part=parts[-1])
                await self._write(part, content[start : start + self._part_bytes])
            note = _PARTS + msgspec.msgpack.encode(parts)
        await self._write(key, note)

    async def _read_note(self, key: CellKey) -> bytes | None:
        if not (note := await self._read(key, is_applied=True)):
            return None
        if note[:1] == _WHOLE:
            return note[1:]
        parts = []
        for number in msgspec.msgpack.decode(note[1:], type=list[int]):
            part = await self._read(msgspec.structs.replace(key, part=number), is_applied=True)
            if not part:
                return None  # trimmed meanwhile
            parts.append(part)
        return b"".join(parts)

    async def _notes(self, section: CellSection) -> list[int]:
        """Return the positions of all notes of a section, ascending."""
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            try:
                found: set[int] = set()
                for at, chain in enumerate(layout.chains):
                    keys = await self._listed(layout, chain, section)
                    found.update(k.position for k in keys if k.position % len(layout.chains) == at)
                return sorted(found)
            except CellsError as error:
                await self._follow(layout, error)
        raise CellsError("the layout of the log changes too often")

    async def _listed(
        self, layout: CellLayout, chain: Chain, section: CellSection
    ) -> list[CellKey]:
        """Return the keys of the notes of a chain, except parts, from its last complete replica."""
        replica = [each for each in chain if not each.is_filling][-1]
        keys: list[CellKey] = []
        after: CellKey | None = None
        while True:
            question = CellKeysWanted(0, replica.space, layout.epoch, section, after)
            answer = await self._ask(replica, question)
            if answer.outcome is not CellOutcome.DONE:
                raise _failure(replica, answer)
            keys += (key for key in answer.listed if not key.part)
            if len(answer.listed) < CELLS_LISTED_MAX:
                return keys
            after = answer.listed[-1]


def _failure(replica: CellReplica, answer: CellAnswer) -> CellsError:
    said = {
        CellOutcome.ABSENT: "has lost the log",
        CellOutcome.DAMAGED: "has a damaged cell",
    }.get(answer.outcome, "refuses the request for now")
    return CellsError(f"{replica.node} {said}")


def _names(replicas: Sequence[CellReplica]) -> str:
    return ", ".join(each.node for each in replicas)
