"""Cells of a log that one process at a time appends to (decision 0090; DistributedLog, BookKeeper).

The *owner* writes a content to all replicas at once. The write is complete when the ack quorum of
the complete replicas has it; the others get it meanwhile. The owner is part of the layout. A claim
is a change of the layout: it seals enough replicas to meet every acknowledged cell, and leaves out
those that it does not seal. So an earlier owner completes no write any more. Before the new owner
writes, it copies each cell that one replica has to all of them. So a cell never gets two contents:
what no replica of the layout has is unwritten, and only the owner writes it.

The copy of a claim is short, because an owner begins no cell that is `window` cells above one that
a replica lacks: below that, all replicas have all cells.

A reader asks a read quorum. What it finds on fewer replicas than the ack quorum, it writes to the
others before it returns it. So nothing is shown that can disappear, and nothing needs to be
announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from indilog.kernel.cell_layout import CellLayout, CellReplica, Chain
from indilog.wire.cell_messages import (
    CELLS_LISTED_MAX,
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellSection,
    CellsSeal,
    CellWanted,
    CellWrite,
)
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells, LayoutSealedError
from indilog_cells.index import GENERATION_LIMITS, GenerationLimits
from indilog_cells.layout_changes import Asks, CellNodes, LayoutChanges, Layouts, Place

WINDOW: Final = 2048
"""How far the owner may be ahead of a replica, in cells. A list of keys has more."""
_CHANGES_MAX: Final = 4
_UNANSWERED_MAX: Final = 64
"""Writes to one replica that wait for an answer; further ones are repeated later."""
_AT_ONCE: Final = 8
"""Cells that are completed at once."""
_PAUSE_S: Final = 0.01
_LOOKS: Final = 20
"""Looks for the layout after a seal, before this process changes the layout itself."""
_WAIT_S: Final = 5.0
"""Seconds that a write waits to become the owner's, or for a slow replica."""

assert WINDOW < CELLS_LISTED_MAX, "one list has all cells of a window"


class OwnedNodes(CellNodes, Protocol):
    """The storage nodes, and time."""

    async def ask_until(self, asks: Asks, heard: Callable[[int, CellAnswer | None], bool]) -> None:
        """Ask nodes at once. `heard` takes the number of each question and its answer (None: none
        in time), also those that arrive later. This returns when it has returned True, or all
        have answered.
        """

    def tell(self, asks: Asks, heard: Callable[[int, CellAnswer | None], object]) -> None:
        """Ask nodes at once, and wait for nothing; `heard` takes each answer."""

    async def run_all(self, works: Sequence[Coroutine[Any, Any, object]]) -> None:
        """Run coroutines; return when all have ended, or raise the error of one."""

    async def pause(self, seconds: float) -> None:
        """Wait."""


class _Lag:
    """Which cells some replicas may lack, of those that the owner has begun in one layout.

    Attributes:
        layout: the layout.
        missing: by position, numbers of replicas that are not known to have the cell.
        failed: positions of which a replica has not confirmed the cell in time.
        unanswered: by number of a replica, the writes that wait for its answer.
        end: all cells that were begun are below it.
    """

    def __init__(self, layout: CellLayout, end: int) -> None:
        self.layout = layout
        self.end = end
        self.missing: dict[int, set[int]] = {}
        self.failed: set[int] = set()
        self.unanswered: Counter[int] = Counter()

    def begin(self, position: int, replicas: int) -> None:
        """Note that a cell is written."""
        self.missing[position] = set(range(replicas))
        self.end = max(self.end, position + 1)

    def heard(self, position: int, replica: int, answer: CellAnswer | None) -> None:
        """Note an answer to a write."""
        self.unanswered[replica] -= 1
        if (missing := self.missing.get(position)) is None:
            return
        if answer is None or answer.outcome is not CellOutcome.DONE:
            self.failed.add(position)
            return
        missing.discard(replica)
        if not missing:
            self.complete(position)

    def complete(self, position: int) -> None:
        """Note that all replicas have a cell, or that its content is not the owner's."""
        self.missing.pop(position, None)
        self.failed.discard(position)

    @property
    def oldest(self) -> int | None:
        """The first cell that a replica may lack; None: there is none."""
        return min(self.missing, default=None)


class OwnedCells(ChainCells):
    """The cells and notes of one log: a `CellsAndNotes`. Its notes are written along the chain.

    Args:
        nodes: the storage nodes.
        layouts: the layouts.
        changes: changes the layout.
        owner: a name that no other process has, nor an earlier one.
        may_claim: tells whether this process may become the owner, given the owner now.
        part_bytes: see `ChainCells`.
        new_part: see `ChainCells`.
        generation_limits: see `ChainCells`.
        window: how far the owner may be ahead of a replica, in cells. All processes of a log use
            the same.
    """

    def __init__(
        self,
        nodes: OwnedNodes,
        layouts: Layouts,
        changes: LayoutChanges,
        *,
        owner: str,
        may_claim: Callable[[str], bool],
        part_bytes: int,
        new_part: Callable[[], int],
        generation_limits: GenerationLimits = GENERATION_LIMITS,
        window: int = WINDOW,
    ) -> None:
        super().__init__(
            nodes,
            layouts,
            part_bytes=part_bytes,
            new_part=new_part,
            generation_limits=generation_limits,
        )
        self._all = nodes
        self._changes = changes
        self._owner = owner
        self._may_claim = may_claim
        self._window = window
        self._lag: _Lag | None = None
        """Of the layout in which this process may write; None: it is not the owner."""
        self._useless_epoch = 0
        """A layout with this epoch must be changed before this process may write."""
        self._is_claiming = False
        self._begun: dict[int, bytes] = {}
        """Contents of unfinished writes: a cell gets one of this process, whatever it asks for."""

    # --- writes

    async def write(self, position: int, content: bytes) -> bool:
        """See `Cells.write`. If this process is not the owner, it becomes the owner first."""
        begun = self._begun.setdefault(position, content)
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            try:
                lag = await self._owned()
                layout = lag.layout
                if position < lag.end - self._window:
                    took = await self._holds(position, begun)
                else:
                    took = await self._write_all(lag, position, begun)
            except CellsError as error:
                await self._follow(layout, error)
            else:
                self._begun.pop(position, None)
                return took and begun == content
        raise CellsError("the layout of the log changes too often")

    async def _holds(self, position: int, content: bytes) -> bool:
        """Return whether a cell that is so old that its content is settled has this content."""
        if (found := await self.read(position)) is None:
            raise CellsError(f"cell {position} is too far below the end of the log")
        return found == content

    async def _write_all(self, lag: _Lag, position: int, content: bytes) -> bool:
        """Write to all replicas; return whether the ack quorum has this content."""
        await self._wait_for_room(lag, position)
        layout, complete = lag.layout, lag.layout.complete
        asks, numbers = self._writes(lag, position, content, complete, 0)
        lag.begin(position, len(layout.chains[0]))
        found: Counter[CellOutcome | None] = Counter()
        needed = layout.ack_quorum

        def heard(at: int, answer: CellAnswer | None) -> bool:
            lag.heard(position, numbers[at], answer)
            found[None if answer is None else answer.outcome] += 1
            failed = found.total() - found[CellOutcome.DONE]
            return (
                found[CellOutcome.DONE] >= needed
                or found[CellOutcome.TAKEN] + found[CellOutcome.SEALED] > 0
                or failed > len(asks) - needed
            )

        if len(asks) < len(complete):
            lag.failed.add(position)
        await self._all.ask_until(asks, heard)
        if found[CellOutcome.TAKEN]:
            lag.complete(position)
            return False
        if found[CellOutcome.DONE] >= needed:
            self._write_filling(lag, position, content)
            return True
        if found[CellOutcome.SEALED]:
            raise LayoutSealedError
        raise CellsError("too few storage nodes take the cell")

    async def _follow(self, layout: CellLayout, error: CellsError) -> None:
        """See `ChainCells._follow`. After a seal, the next layout is recorded soon."""
        for _ in range(_LOOKS if isinstance(error, LayoutSealedError) else 0):
            if self._layouts.layout.epoch > layout.epoch:
                return
            await self._layouts.renew()
            if self._layouts.layout.epoch == layout.epoch:
                await self._all.pause(_PAUSE_S)
        if isinstance(error, LayoutSealedError):
            self._useless_epoch = max(self._useless_epoch, layout.epoch)
        await super()._follow(layout, error)

    def _write_filling(self, lag: _Lag, position: int, content: bytes) -> None:
        """Write a content that the ack quorum has to the replicas that are filling."""
        first = len(lag.layout.complete)
        filling = lag.layout.chains[0][first:]
        if not filling:
            return
        asks, numbers = self._writes(lag, position, content, filling, first)
        if len(asks) < len(filling):
            lag.failed.add(position)
        self._all.tell(asks, lambda at, answer: lag.heard(position, numbers[at], answer))

    @staticmethod
    def _writes(
        lag: _Lag, position: int, content: bytes, replicas: Chain, first: int
    ) -> tuple[Asks, list[int]]:
        """Return writes to those replicas that answer, and their numbers in the chain."""
        numbers = [
            number
            for number in range(first, first + len(replicas))
            if lag.unanswered[number] < _UNANSWERED_MAX
        ]
        lag.unanswered.update(numbers)
        key = CellKey(CellSection.RECORDS, position)
        return [
            _write(replicas[number - first], lag.layout, key, content) for number in numbers
        ], numbers

    async def _wait_for_room(self, lag: _Lag, position: int) -> None:
        """Wait until no replica lacks a cell that is a window below this one."""
        left_s = _WAIT_S
        while (oldest := lag.oldest) is not None and position - oldest >= self._window:
            if left_s <= 0 or self._layouts.layout != lag.layout:
                raise CellsError("a storage node is too slow")
            left_s -= _PAUSE_S
            await self._all.pause(_PAUSE_S)

    @property
    def is_owner(self) -> bool:
        """Whether this process is the owner in the newest layout that it knows."""
        return self._lag is not None and self._lag.layout == self._layouts.layout

    def late(self) -> set[Place]:
        """Return the replicas that do not answer, and may soon hold up the owner: they lack a cell
        that is half a window old.
        """
        lag = self._lag
        if lag is None or not self.is_owner or (oldest := lag.oldest) is None:
            return set()
        if max(lag.missing) - oldest < self._window // 2 or oldest not in lag.failed:
            return set()
        chain = lag.layout.chains[0]
        return {(chain[at].node, chain[at].space) for at in lag.missing[oldest]}

    async def repair(self) -> None:
        """Complete the cells of the owner that a replica did not confirm in time.

        Raises:
            CellsError: some are still not complete.
        """
        lag = self._lag
        if lag is None:
            return
        failed = sorted(lag.failed)
        for first in range(0, len(failed), _AT_ONCE):
            if not self.is_owner:
                return
            chosen = failed[first : first + _AT_ONCE]
            await self._all.run_all([self._repair(lag, position) for position in chosen])

    async def _repair(self, lag: _Lag, position: int) -> None:
        if await self._completed(CellKey(CellSection.RECORDS, position)) is not None:
            lag.complete(position)

    # --- ownership

    async def _owned(self) -> _Lag:
        """Return what replicas lack in the newest layout, as its owner; claim the log if necessary.

        Raises:
            CellsError: another process is the owner, or the log cannot be claimed now.
        """
        left_s = _WAIT_S
        while True:
            layout, lag = self._layouts.layout, self._lag
            is_useless = self._useless_epoch >= layout.epoch
            if lag is not None and lag.layout == layout and not is_useless:
                return lag
            is_own = layout.owner == self._owner
            if not self._is_claiming and (is_own or self._may_claim(layout.owner)):
                self._is_claiming = True
                try:
                    return await self._begin_epoch(layout, claims=is_useless or not is_own)
                finally:
                    self._is_claiming = False
            if left_s <= 0:
                raise CellsError(f"{layout.owner} appends to the log")
            left_s -= _PAUSE_S
            await self._all.pause(_PAUSE_S)

    async def _begin_epoch(self, layout: CellLayout, *, claims: bool) -> _Lag:
        """Become the owner, and complete what earlier owners have begun."""
        self._lag = None
        if claims:
            revised = _owned_by(layout, self._owner)
            changed = await self._changes.change(layout, revised)
            if changed is None:
                raise CellsError("another process changes the layout of the log")
            layout = changed
        try:
            end = await self.recover(layout)
        except LayoutSealedError:
            raise
        except CellsError:
            self._useless_epoch = max(self._useless_epoch, layout.epoch)
            if claims:
                raise
            return await self._begin_epoch(layout, claims=True)  # leave out a lost replica
        self._lag = _Lag(layout, end)
        return self._lag

    async def recover(self, layout: CellLayout) -> int:
        """Copy each cell that one complete replica of a layout has to all complete ones: all cells
        that were acknowledged before are on all of them then. Return the end of the log: no
        replica has a cell at or above it, unless it is written meanwhile.

        Raises:
            CellsError: a replica may lack a cell.
        """
        replicas = layout.complete
        sealed = await self._ask_each(
            [(each.node, CellsSeal(0, each.space, layout.epoch)) for each in replicas], replicas
        )
        end = max(answer.end for answer in sealed)
        start = max(0, end - self._window)
        after = CellKey(CellSection.RECORDS, start - 1) if start else None
        listed = await self._ask_each(
            [
                (r.node, CellKeysWanted(0, r.space, layout.epoch, CellSection.RECORDS, after))
                for r in replicas
            ],
            replicas,
        )
        if any(len(answer.listed) >= CELLS_LISTED_MAX for answer in listed):
            raise CellsError("the log grows while it is recovered")
        floor = max(answer.floor for answer in listed)
        counts = Counter(key for answer in listed for key in answer.listed)
        keys = sorted(k for k, n in counts.items() if n < len(replicas) and k.position >= floor)
        for first in range(0, len(keys), _AT_ONCE):
            chosen = keys[first : first + _AT_ONCE]
            await self._all.run_all([self._recover(layout, key) for key in chosen])
        return end

    async def _recover(self, layout: CellLayout, key: CellKey) -> None:
        """Copy a cell that a replica has. A read could miss it: a quorum may not have it."""
        replicas = layout.complete
        answers = await self._nodes.ask_all(
            [(each.node, CellWanted(0, each.space, layout.epoch, key)) for each in replicas]
        )
        outcomes = {None if answer is None else answer.outcome for answer in answers}
        if CellOutcome.SEALED in outcomes:
            raise LayoutSealedError
        if CellOutcome.TRIMMED in outcomes:
            return
        for answer in answers:
            if answer is not None and answer.outcome is CellOutcome.DONE:
                await self._spread(layout, key, answer.content, replicas, len(replicas))
                return
        raise CellsError(f"cell {key.position} cannot be read from any storage node")

    async def _ask_each(self, asks: Asks, replicas: Chain) -> list[CellAnswer]:
        """Return the answers if all are `DONE`."""
        answers = await self._nodes.ask_all(asks)
        done: list[CellAnswer] = []
        for replica, answer in zip(replicas, answers, strict=True):
            if answer is None:
                raise CellsError(f"{replica.node} does not answer")
            if answer.outcome is CellOutcome.SEALED:
                raise LayoutSealedError
            if answer.outcome is not CellOutcome.DONE:
                raise CellsError(f"{replica.node} refuses the request for now")
            done.append(answer)
        return done

    # --- reads

    async def complete(self, key: CellKey) -> None:
        """See `ChainCells.complete`."""
        await self._completed(key)

    async def _completed(self, key: CellKey) -> bytes | None:
        """Return the content of a cell, after all replicas have it."""
        content = await self._read(key)
        if content and key.section == CellSection.RECORDS:
            layout = self._layouts.layout
            (chain,) = layout.chains
            await self._spread(layout, key, content, chain, len(chain))
        return content

    async def _read_last(self, layout: CellLayout, key: CellKey) -> bytes | None:
        """Return what a read quorum says, after the ack quorum has it."""
        if key.section != CellSection.RECORDS:
            return await super()._read_last(layout, key)
        replicas = layout.complete
        needed = layout.read_quorum
        outcomes: Counter[CellOutcome] = Counter()
        contents: set[bytes] = set()

        def heard(_: int, answer: CellAnswer | None) -> bool:
            outcome = CellOutcome.REFUSED if answer is None else answer.outcome
            outcomes[outcome] += 1
            if answer is not None and outcome is CellOutcome.DONE:
                contents.add(answer.content)
            silent = sum(outcomes[each] for each in _SILENT)
            return (
                outcomes[CellOutcome.TRIMMED] + outcomes[CellOutcome.SEALED] > 0
                or outcomes[CellOutcome.UNWRITTEN] >= needed
                or (bool(contents) and outcomes.total() - silent >= needed)
                or silent > len(replicas) - needed
            )

        asks = [(r.node, CellWanted(0, r.space, layout.epoch, key)) for r in replicas]
        await self._all.ask_until(asks, heard)
        if outcomes[CellOutcome.SEALED]:
            raise LayoutSealedError
        if outcomes[CellOutcome.TRIMMED]:
            return b""
        if outcomes[CellOutcome.UNWRITTEN] >= needed:
            return None
        if not contents or sum(outcomes[each] for each in _SILENT) > len(replicas) - needed:
            raise CellsError(f"cell {key.position} cannot be read from enough storage nodes")
        if len(contents) > 1:
            raise CellsError(f"cell {key.position} has two contents")
        content = next(iter(contents))
        if outcomes[CellOutcome.DONE] < layout.ack_quorum:
            await self._spread(layout, key, content, replicas, layout.ack_quorum)
        return content

    async def _spread(
        self, layout: CellLayout, key: CellKey, content: bytes, replicas: Chain, needed: int
    ) -> None:
        """Write a content that a replica has to others; return when so many replicas have it.

        Raises:
            CellsError: they may not have it.
        """
        found: Counter[CellOutcome | None] = Counter()

        def heard(_: int, answer: CellAnswer | None) -> bool:
            found[None if answer is None else answer.outcome] += 1
            done = found[CellOutcome.DONE]
            return done >= needed or found.total() - done > len(replicas) - needed

        await self._all.ask_until([_write(r, layout, key, content) for r in replicas], heard)
        if found[CellOutcome.DONE] < needed:
            if found[CellOutcome.SEALED]:
                raise LayoutSealedError
            raise CellsError(f"too few storage nodes take cell {key.position}")


_SILENT: Final = (CellOutcome.REFUSED, CellOutcome.ABSENT)
"""Answers that say nothing about a cell."""


def _write(
    replica: CellReplica, layout: CellLayout, key: CellKey, content: bytes
) -> tuple[Any, CellWrite]:
    return replica.node, CellWrite(0, replica.space, layout.epoch, key, content)


def _owned_by(layout: CellLayout, owner: str) -> CellLayout:
    return CellLayout(layout.epoch, layout.chains, owner, layout.lacking)
