"""Upkeep of the layout of a log over cells of storage nodes: replaces lost nodes, and fills their
successors (decision 0086; CORFU 2.5).

One compute node checks each log periodically, and changes its layout (`layout_changes`) if a node
is lost. If a process crashed during a change, the next check finds sealed replicas, and makes the
change anew.

A new replica is *filling*, and comes last in its chain. Contents are copied to it from a complete
replica while appends and reads continue. When all contents are copied, a further layout records
that the replica is complete.

`opening` calls `check`; `owned_upkeep` adapts it to logs of kind `owned`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import structlog

from indilog.kernel.cell_layout import CellLayout, CellReplica, complete_of
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
from indilog_cells.chain_cells import ChainCells
from indilog_cells.layout_changes import CellNodes, LayoutChanges, Layouts, Place

_COPIED_AT_ONCE: Final = 8
"""Cells that are copied at once to a new replica."""

_CellsT = TypeVar("_CellsT", bound=ChainCells)
RunAll: TypeAlias = Callable[[Sequence[Coroutine[Any, Any, object]]], Awaitable[object]]
"""Runs coroutines concurrently; returns when all have ended, or raises the error of one."""

_log = structlog.get_logger(__name__)


class ChainUpkeep(Generic[_CellsT]):
    """Checks the layout of one log.

    Args:
        cells: the cells of the log.
        nodes: the storage nodes.
        layouts: the layouts of the log.
        changes: changes the layout.
        run_all: runs coroutines concurrently.
        replace_after_s: seconds after which a node that does not answer is replaced.
        clock: returns seconds, and never goes back.
    """

    def __init__(
        self,
        cells: _CellsT,
        nodes: CellNodes,
        layouts: Layouts,
        changes: LayoutChanges,
        run_all: RunAll,
        *,
        replace_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._cells = cells
        self._nodes = nodes
        self._run_all = run_all
        self._layouts = layouts
        self._changes = changes
        self._replace_after_s = replace_after_s
        self._clock = clock
        self._silent_since: dict[Place, float] = {}

    async def check(self) -> None:
        """Replace lost nodes, or fill new replicas, if necessary.

        Raises:
            CellsError: a node must be replaced, or a replica filled, which is impossible now.
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
        lost = self._late()
        for replica, answer in zip(asked, answers, strict=True):
            if self._is_lost(replica, answer, now):
                lost.add(replica)
        if sealed or lost:
            await self._change(layout, lost)
        elif len(present) < len(answers):
            return
        elif self._may_improve(layout):
            await self._change(layout, lost, only_if_better=True)
        elif layout.is_filling:
            await self._fill(layout)
        else:
            await self._settle(layout)

    def _late(self) -> set[Place]:
        """Return the replicas to replace even if they answer."""
        return set()

    async def _settle(self, layout: CellLayout) -> None:
        """Finish the upkeep when all replicas are complete and answer: nothing is left to do."""

    def _is_lost(self, replica: Place, answer: CellAnswer | None, now: float) -> bool:
        if answer is not None and answer.outcome is not CellOutcome.REFUSED:
            self._silent_since.pop(replica, None)
            return answer.outcome is CellOutcome.ABSENT
        return now - self._silent_since.setdefault(replica, now) >= self._replace_after_s

    def _may_improve(self, layout: CellLayout) -> bool:
        """Whether a chain has too few replicas, or one on a node that is no longer available."""
        available = set(self._changes.available())
        copies = min(self._changes.copies, len(available))
        return not layout.is_filling and any(
            len(chain) < copies or any(each.node not in available for each in chain)
            for chain in layout.chains
        )

    async def _change(
        self, layout: CellLayout, lost: set[Place], *, only_if_better: bool = False
    ) -> None:
        """Replace lost replicas, and those that do not answer."""
        after = await self._changes.change(
            layout, layout, lost=lost, adds=True, only_if_better=only_if_better
        )
        if after is not None and after.replicas != layout.replicas:
            names = sorted({node for node, _ in layout.replicas.difference(after.replicas)})
            _log.warning(
                "storage nodes of a log were replaced",
                log=self._changes.folder, epoch=after.epoch, lost=names,
            )  # fmt: skip

    async def _fill(self, layout: CellLayout) -> None:
        """Copy contents to new replicas, then record that these are complete."""
        await self._copy_all(layout)
        await self._record_filled(layout)

    async def _record_filled(self, layout: CellLayout) -> None:
        after = layout.filled(layout.epoch + 1)
        if self._layouts.layout == layout and await self._layouts.change(layout, after):
            self._say_complete(after)

    def _say_complete(self, layout: CellLayout) -> None:
        _log.info(
            "storage nodes of a log are complete", log=self._changes.folder, epoch=layout.epoch
        )

    async def _copy_all(self, layout: CellLayout) -> None:
        """Copy contents to new replicas."""
        for at, chain in enumerate(layout.chains):
            # A cell of the last complete replica is also in all replicas before it.
            source = complete_of(chain)[-1]
            for target in chain:
                if target.is_filling:
                    for section in CellSection:
                        await self._copy(layout, at, section, source, target)

    async def _copy(
        self,
        layout: CellLayout,
        at: int,
        section: CellSection,
        source: CellReplica,
        target: CellReplica,
    ) -> None:
        """Copy the cells or notes of one section, of the chain with number `at`."""
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
