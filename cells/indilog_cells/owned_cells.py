"""Cells of a log that one process at a time appends to (decision 0090; DistributedLog, BookKeeper).

The *owner* writes a content to all replicas at once. The write is complete when the ack quorum of
the complete replicas has the content; the other replicas get it in the background. The layout names
the owner. A *claim* is a change of the layout that names another owner. It seals enough replicas
that each acknowledged cell is on a sealed one, and leaves out the replicas that it does not seal.
So an earlier owner completes no write any more. Before the new owner writes, it *recovers* the log:
it copies each cell that any replica has to all of them. So a cell never gets two contents: a cell
that no replica of the layout has is unwritten, and only the owner writes it.

The process that appends asks for its *tenure* first (`acquire`). It names the tenure in the layout,
and a write belongs to one tenure: it is given up in any later one, also in one of the same process.
Other processes send their contents to the owner (`indilog_cells.core`), and claim the log only if
the owner does not append them.

A recovery is short, because an owner begins no cell that is `window` or more cells above one that a
replica lacks. All replicas have all cells further below.

A reader asks a read quorum. If it finds a content on fewer replicas than the ack quorum, it writes
the content to more replicas before it returns it. So no read returns a content that can disappear,
and the owner need not announce which cells are acknowledged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol

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
"""How far the owner may be ahead of a replica, in cells; less than the length of a list of keys."""
_CHANGES_MAX: Final = 4
_UNANSWERED_MAX: Final = 64
"""Writes to one replica that may wait for an answer. Further cells are not sent to it, and
`OwnedCells.repair` writes them later.
"""
_AT_ONCE: Final = 8
"""Cells that are completed concurrently."""
_PAUSE_S: Final = 0.01
_LOOKS: Final = 20
"""How often a process that finds a seal reads the layout, before it changes the layout itself."""
_WAIT_S: Final = 5.0
"""Seconds that a call waits for a change of the layout by this process, or for a slow replica."""

assert WINDOW < CELLS_LISTED_MAX, "one list has all cells of a window"


class DeposedError(CellsError):
    """A tenure has ended: a content is not written in it any more, but may have been.

    Attributes:
        tenure: the tenure.
    """

    def __init__(self, tenure: Tenure) -> None:
        super().__init__("another process appends to the log")
        self.tenure = tenure


class Tenure(NamedTuple):
    """A tenure of this process."""

    name: str


class Elsewhere(NamedTuple):
    """Another process is the owner."""

    owner: str


class OwnedNodes(CellNodes, Protocol):
    """The storage nodes, and the event loop's concurrency and time."""

    async def ask_until(self, asks: Asks, heard: Callable[[int, CellAnswer | None], bool]) -> None:
        """Ask nodes concurrently. `heard` is called with the number of each question and its answer
        (None: the node did not answer in time). This call returns when `heard` has returned True,
        or all questions have their answers. `heard` is called for later answers too.
        """

    def tell(self, asks: Asks, heard: Callable[[int, CellAnswer | None], object]) -> None:
        """Ask nodes concurrently, and return at once; `heard` is called with each answer."""

    async def run_all(self, works: Sequence[Coroutine[Any, Any, object]]) -> None:
        """Run coroutines concurrently; return when all have ended, or raise the error of one."""

    async def pause(self, seconds: float) -> None:
        """Wait for a time."""


class _Lag:
    """The cells that the owner has begun in one layout and that some replicas may lack.

    A replica has a number: its place in the chain.

    Attributes:
        layout: the layout.
        missing: by position, the numbers of the replicas that are not known to have the cell.
        failed: positions of cells that a replica did not confirm; `OwnedCells.repair` completes
            them.
        unanswered: by number of a replica, how many writes wait for its answer.
        end: the position after all cells that were begun.
    """

    def __init__(self, layout: CellLayout, end: int) -> None:
        self.layout = layout
        self.end = end
        self.missing: dict[int, set[int]] = {}
        self.failed: set[int] = set()
        self.unanswered: Counter[int] = Counter()

    def begin(self, position: int, replicas: int) -> None:
        """Note that the write of a cell begins."""
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
        """Note that no replica has to get a cell: all have it, or it has another content."""
        self.missing.pop(position, None)
        self.failed.discard(position)

    @property
    def oldest(self) -> int | None:
        """The first cell that a replica may lack; None: there is none."""
        return min(self.missing, default=None)


class OwnedCells(ChainCells):
    """The cells and notes of one log: a `CellsAndNotes`. Notes are written as in `ChainCells`: to
    one replica after another.

    Args:
        nodes: the storage nodes.
        layouts: the layouts of the log.
        changes: changes the layout.
        new_owner: returns a name for a tenure, which no other one has.
        may_claim: tells whether this process may take the log from its owner, although the owner
            was not asked to append anything.
        part_bytes: see `ChainCells`.
        new_part: see `ChainCells`.
        generation_limits: see `ChainCells`.
        window: how far the owner may be ahead of a replica, in cells. All processes that use the
            log have the same window.

    Attributes:
        tenure: the tenure in which `write` writes; the caller sets it to what `acquire` returned.
    """

    def __init__(
        self,
        nodes: OwnedNodes,
        layouts: Layouts,
        changes: LayoutChanges,
        *,
        new_owner: Callable[[], str],
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
        self._new_owner = new_owner
        self._owner = ""
        """The newest tenure of this process; empty: it had none."""
        self.tenure = Tenure("")
        self._useless_owner = ""
        """A tenure of another process in which nothing is appended for this one."""
        self._may_claim = may_claim
        self._window = window
        self._lag: _Lag | None = None
        """For the layout in which this process is the owner; None: it is not the owner."""
        self._useless_epoch = 0
        """A layout with this or a smaller epoch must be changed before this process may write."""
        self._is_claiming = False
        self._begun: dict[tuple[Tenure, int], bytes] = {}
        """By tenure and position, the contents of unfinished writes. A further write to such a cell
        repeats this content, even if it is called with another one.
        """

    # --- writes

    async def write(self, position: int, content: bytes) -> bool:
        """Write in the tenure of now; see `write_in`."""
        return await self.write_in(self.tenure, position, content)

    async def write_in(self, tenure: Tenure, position: int, content: bytes) -> bool:
        """See `Cells.write`.

        Raises:
            DeposedError: the tenure has ended; the write may have taken effect before.
        """
        key = tenure, position
        begun = self._begun.setdefault(key, content)
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            try:
                lag = await self._owned(tenure)
                layout = lag.layout
                if position < lag.end - self._window:
                    took = await self._holds(position, begun)
                else:
                    took = await self._write_all(lag, position, begun)
            except DeposedError:
                self._begun.pop(key, None)
                raise
            except CellsError as error:
                await self._follow(layout, error)
            else:
                self._begun.pop(key, None)
                return took and begun == content
        raise CellsError("the layout of the log changes too often")

    async def _holds(self, position: int, content: bytes) -> bool:
        """Return whether a cell has this content. The cell is so old that it gets no other one."""
        if (found := await self.read(position)) is None:
            raise CellsError(f"cell {position} is too far below the end of the log")
        return found == content

    async def _write_all(self, lag: _Lag, position: int, content: bytes) -> bool:
        """Write to all replicas. Return True when the ack quorum has this content; False: the cell
        has another content.
        """
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
        """See `ChainCells._follow`. After a seal, wait a while for the layout of the process that
        sealed. If it is not recorded, note that this process has to change the layout.
        """
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
        """Return writes to the replicas without too many unanswered writes, and the numbers of
        these replicas in the chain.
        """
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
        """Wait until no replica lacks a cell that is a window or more below this one."""
        left_s = _WAIT_S
        while (oldest := lag.oldest) is not None and position - oldest >= self._window:
            if left_s <= 0 or self._layouts.layout != lag.layout:
                raise CellsError("a storage node is too slow")
            left_s -= _PAUSE_S
            await self._all.pause(_PAUSE_S)

    @property
    def is_owner(self) -> bool:
        """Whether this process has recovered the log as the owner in the newest layout that it
        knows.
        """
        return self._lag is not None and self._lag.layout == self._layouts.layout

    def late(self) -> set[Place]:
        """Return the replicas that did not confirm the owner's oldest incomplete cell, if that cell
        is half a window below the newest one: they may soon block the owner.
        """
        lag = self._lag
        if lag is None or not self.is_owner or (oldest := lag.oldest) is None:
            return set()
        if max(lag.missing) - oldest < self._window // 2 or oldest not in lag.failed:
            return set()
        chain = lag.layout.chains[0]
        return {(chain[at].node, chain[at].space) for at in lag.missing[oldest]}

    async def repair(self) -> None:
        """As the owner, complete the cells that a replica did not confirm.

        Raises:
            CellsError: some cells are still incomplete.
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

    async def acquire(self) -> Tenure | Elsewhere:
        """Return the tenure of this process, after it has claimed the log if necessary; or the
        owner that appends the contents of this process.

        Raises:
            CellsError: the log cannot be claimed now.
        """
        for _ in range(_CHANGES_MAX):
            layout = self._layouts.layout
            if self._is_own(layout):
                return Tenure(self._owner)
            if layout.owner != self._useless_owner and not self._may_claim(layout.owner):
                return Elsewhere(layout.owner)
            await self._begin_alone(layout)
        raise CellsError("the layout of the log changes too often")

    def give_up_on(self, owner: str) -> None:
        """Claim the log before anything else is appended, if this is its owner: what it was asked
        to append has an unknown outcome.
        """
        if owner == self._layouts.layout.owner:
            self._useless_owner = owner

    def appends_in(self, owner: str) -> bool:
        """Whether this process appends to the log, in the tenure of this name."""
        return bool(owner) and owner == self.tenure.name == self._layouts.layout.owner

    def _is_own(self, layout: CellLayout) -> bool:
        return bool(self._owner) and layout.owner == self._owner

    async def _owned(self, tenure: Tenure) -> _Lag:
        """Return what replicas lack in the newest layout, as its owner.

        Raises:
            DeposedError: the tenure has ended.
            CellsError: the cells of the newest layout cannot be completed now.
        """
        while True:
            layout, lag = self._layouts.layout, self._lag
            if not self._is_own(layout) or tenure.name != self._owner:
                raise DeposedError(tenure)
            if lag is not None and lag.layout == layout and self._useless_epoch < layout.epoch:
                return lag
            await self._begin_alone(layout)

    async def _begin_alone(self, layout: CellLayout) -> None:
        """Begin to write in a layout, unless another call of this process does; then wait for it.

        Raises:
            CellsError: the log cannot be claimed, or its cells cannot be completed now.
        """
        left_s = _WAIT_S
        if not self._is_claiming:
            self._is_claiming = True
            try:
                await self._begin_epoch(layout)
            finally:
                self._is_claiming = False
            return
        while self._is_claiming:
            if left_s <= 0:
                raise CellsError("the layout of the log is being changed")
            left_s -= _PAUSE_S
            await self._all.pause(_PAUSE_S)

    async def _begin_epoch(self, layout: CellLayout) -> None:
        """Become the owner, and recover the log: complete what earlier owners began."""
        self._lag = None
        is_own = self._is_own(layout)
        claims = self._useless_epoch >= layout.epoch or not is_own
        if claims:
            owner = self._owner if is_own else self._new_owner()
            changed = await self._changes.change(layout, _owned_by(layout, owner))
            if changed is None:
                if self._layouts.layout.epoch > layout.epoch:
                    return
                raise CellsError("another process changes the layout of the log")
            if not is_own:
                self._begun.clear()  # the seal ends these writes
            layout, self._owner = changed, owner
        try:
            end = await self.recover(layout)
        except LayoutSealedError:
            raise
        except CellsError:
            self._useless_epoch = max(self._useless_epoch, layout.epoch)
            if claims:
                raise
            await self._begin_epoch(layout)  # leave out a lost replica
            return
        self._lag = _Lag(layout, end)

    async def recover(self, layout: CellLayout) -> int:
        """Copy each cell that any complete replica of a layout has to all complete ones. Then all
        of them have all cells that were acknowledged before this call. Return the end of the log:
        no replica had a cell at or above it when it was asked.

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
        """Copy a cell that a replica has to all complete ones. It asks all replicas, not a read
        quorum, which might miss the cell.
        """
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
        """Ask replicas, and return their answers.

        Raises:
            CellsError: an answer is missing, or is not `DONE`.
        """
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
        """Return the content of a cell, after copying it to all replicas; None: it is unwritten."""
        content = await self._read(key)
        if content and key.section == CellSection.RECORDS:
            layout = self._layouts.layout
            (chain,) = layout.chains
            await self._spread(layout, key, content, chain, len(chain))
        return content

    async def _read_last(self, layout: CellLayout, key: CellKey) -> bytes | None:
        """Return the content that a read quorum has, after writing it to the ack quorum; None: the
        cell is unwritten.
        """
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
        """Write a content that a replica has to all; return when `needed` replicas have it.

        Raises:
            CellsError: fewer replicas may have it.
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
