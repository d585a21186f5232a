"""Upkeep of the layout of a log over cells of storage nodes: lost nodes are replaced, and their
successors are filled (decision 0086; CORFU 2.5).

One compute node checks each log periodically. To change the layout, it first seals the replicas
that answer for the epoch of the next layout. From then on no write of the epoch before completes.
Then the next layout is recorded, if no other process has recorded one. A process that crashes in
between leaves sealed replicas; the next check finds these, and finishes the change.

A new replica is at the end of its chain and *filling*: contents are copied to it from a complete
replica, while appends and reads go on. When all are copied, a further layout says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Final, TypeAlias

import structlog

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, CellReplica, repaired, space_of
from indilog.wire.cell_messages import (
    CELLS_LISTED_MAX,
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellSection,
    CellsSeal,
    CellsTrim,
)
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import CellNodes, ChainCells, Layouts

_COPIED_AT_ONCE: Final = 8
"""Cells that are copied at once to a new replica."""

RunAll: TypeAlias = Callable[[Sequence[Coroutine[Any, Any, object]]], Awaitable[object]]
"""Runs coroutines at once; returns when all have ended, or raises the error of one."""

_log = structlog.get_logger(__name__)


class ChainUpkeep:
    """Checks the layout of one log.

    Args:
        cells: the cells of the log.
        nodes: the storage nodes.
        layouts: the layouts.
        run_all: runs coroutines at once.
        folder: a name of the log that no other log has.
        copies: replicas that a chain should have.
        available: returns the storage nodes that may keep cells.
        replace_after_s: seconds after which a silent node is replaced.
        clock: returns seconds, and never goes back.
    """

    def __init__(
        self,
        cells: ChainCells,
        nodes: CellNodes,
        layouts: Layouts,
        run_all: RunAll,
        *,
        folder: str,
        copies: int,
        available: Callable[[], Sequence[NodeId]],
        replace_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._cells = cells
        self._nodes = nodes
        self._run_all = run_all
        self._layouts = layouts
        self._folder = folder
        self._copies = copies
        self._available = available
        self._replace_after_s = replace_after_s
        self._clock = clock
        self._silent_since: dict[tuple[NodeId, str], float] = {}

    async def check(self) -> None:
        """Replace lost nodes, or fill new replicas, if necessary.

        Raises:
            CellsError: something is to be done, and cannot be done now.
        """
        layout = self._layouts.layout
        asked = sorted(layout.replicas)
        answers = await self._nodes.ask_all(
            [(node, CellsSeal(0, space, layout.epoch)) for node, space in asked]
        )
        present = [each for each in answers if each is not None]
        sealed = [each.epoch for each in present if each.outcome is CellOutcome.SEALED]
        if sealed:
            await self._layouts.renew()
            if self._layouts.layout.epoch > layout.epoch:
                return  # another process has changed it
        now = self._clock()
        lost: set[tuple[NodeId, str]] = set()
        for replica, answer in zip(asked, answers, strict=True):
            if self._is_lost(replica, answer, now):
                lost.add(replica)
        answered = len(present) == len(answers)
        if sealed or lost or (answered and self._may_improve(layout)):
            epoch = max([layout.epoch, *sealed]) + 1
            await self._change(layout, lost, epoch, is_due=bool(sealed or lost))
        elif layout.is_filling and answered:
            await self._fill(layout)

    def _is_lost(self, replica: tuple[NodeId, str], answer: CellAnswer | None, now: float) -> bool:
        if answer is not None and answer.outcome is not CellOutcome.REFUSED:
            self._silent_since.pop(replica, None)
            return answer.outcome is CellOutcome.ABSENT
        return now - self._silent_since.setdefault(replica, now) >= self._replace_after_s

    def _may_improve(self, layout: CellLayout) -> bool:
        """Whether a chain has too few replicas, or one on a node that is not available any more."""
        available = set(self._available())
        copies = min(self._copies, len(available))
        return not layout.is_filling and any(
            len(chain) < copies or any(each.node not in available for each in chain)
            for chain in layout.chains
        )

    async def _change(
        self, layout: CellLayout, lost: set[tuple[NodeId, str]], epoch: int, *, is_due: bool
    ) -> None:
        """Seal the replicas of a layout except lost ones, and record the next layout.

        Args:
            layout: the layout.
            lost: replicas that are not asked any more.
            epoch: of the next layout.
            is_due: change it also if all chains stay as they are.
        """
        space = space_of(self._folder, epoch)
        available = self._available()
        gone = {node for node, _ in lost}
        candidates = [node for node in available if node not in gone]
        opened = [
            node
            for node, _ in await self._done(
                [(node, CellsSeal(0, space, epoch, opens=True)) for node in candidates]
            )
        ]

        def next_layout(sealed: Collection[tuple[NodeId, str]]) -> CellLayout | None:
            return repaired(
                layout,
                self._folder,
                epoch,
                sealed=sealed,
                available=available,
                opened=opened,
                copies=self._copies,
            )

        if not is_due:
            after = next_layout(layout.replicas)
            if after is not None and after.chains == layout.chains:
                return
        asked = [replica for replica in sorted(layout.replicas) if replica not in lost]
        sealed = await self._done([(node, CellsSeal(0, s, epoch)) for node, s in asked])
        after = next_layout(sealed)
        if after is None:
            raise CellsError("a chain has no complete replica that answers")
        if await self._layouts.change(layout, after):
            names = sorted({node for node, _ in layout.replicas.difference(sealed)})
            _log.warning(
                "storage nodes of a log were replaced", log=self._folder, epoch=epoch, lost=names
            )

    async def _done(self, asks: Sequence[tuple[NodeId, CellsSeal]]) -> list[tuple[NodeId, str]]:
        """Ask; return the nodes and spaces that answer with `DONE`."""
        answers = await self._nodes.ask_all(asks) if asks else ()
        return [
            (node, question.space)
            for (node, question), answer in zip(asks, answers, strict=True)
            if answer is not None and answer.outcome is CellOutcome.DONE
        ]

    async def _fill(self, layout: CellLayout) -> None:
        """Copy contents to new replicas, then record that these are complete."""
        for at, chain in enumerate(layout.chains):
            # A cell of the last complete replica is also in all replicas before it.
            source = [each for each in chain if not each.is_filling][-1]
            for target in chain:
                if target.is_filling:
                    for section in CellSection:
                        await self._copy(layout, at, section, source, target)
        after = layout.filled(layout.epoch + 1)
        if self._layouts.layout == layout and await self._layouts.change(layout, after):
            _log.info("storage nodes of a log are complete", log=self._folder, epoch=after.epoch)

    async def _copy(
        self,
        layout: CellLayout,
        at: int,
        section: CellSection,
        source: CellReplica,
        target: CellReplica,
    ) -> None:
        """Copy a section of the chain number `at`."""
        after: CellKey | None = None
        while True:
            questions = [
                (each.node, CellKeysWanted(0, each.space, layout.epoch, section, after))
                for each in (source, target)
            ]
            found, there = _done(await self._nodes.ask_all(questions))
            if found.floor > there.floor:
                trim = CellsTrim(0, target.space, layout.epoch, section, found.floor)
                _done(await self._nodes.ask_all([(target.node, trim)]))
            known = set(there.listed)
            keys = [
                key
                for key in found.listed
                if key.position % len(layout.chains) == at and key not in known
            ]
            for start in range(0, len(keys), _COPIED_AT_ONCE):
                chosen = keys[start : start + _COPIED_AT_ONCE]
                await self._run_all([self._cells.complete(key) for key in chosen])
            if len(found.listed) < CELLS_LISTED_MAX:
                return
            after = found.listed[-1]


def _done(answers: Sequence[CellAnswer | None]) -> list[CellAnswer]:
    """Return the answers if all questions were answered with `DONE`.

    Raises:
        CellsError: one was not.
    """
    done = [each for each in answers if each is not None and each.outcome is CellOutcome.DONE]
    if len(done) < len(answers):
        raise CellsError("a storage node does not answer while cells are copied")
    return done
