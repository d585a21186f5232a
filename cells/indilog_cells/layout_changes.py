"""Changes of the layout of a log over cells of storage nodes (decision 0086; CORFU 2.5).

To change a layout, a process first *seals* replicas with the epoch of the next layout: they refuse
questions of smaller epochs, except reads of cells that the asker has applied. When enough replicas
are sealed, no write of the old layout can complete any more. Then the process records the next
layout, which consists of sealed and new replicas, unless another process has recorded one. Before
that, the process writes no cell, because the layout of another process may be recorded instead. A
process that crashes in between leaves sealed replicas; the next change seals them with a greater
epoch.

`chain_upkeep` and the claims of `owned_cells` change layouts this way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol, TypeAlias

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, complete_of, repaired, space_of
from indilog.wire.cell_messages import CellAnswer, CellOutcome, CellQuestion, CellsSeal
from indilog_cells.cells import CellsError

_SEALS_MAX: Final = 3
"""Attempts to seal, if other processes have sealed with greater epochs."""

Asks: TypeAlias = Sequence[tuple[NodeId, CellQuestion]]
Place: TypeAlias = tuple[NodeId, str]
"""A node, and a space on it."""


class CellNodes(Protocol):
    """The storage nodes."""

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        """Ask nodes concurrently; return their answers in order. None: the node did not answer in
        time.
        """


class Layouts(Protocol):
    """The layouts of one log."""

    @property
    def layout(self) -> CellLayout:
        """The newest layout that this process knows."""

    async def renew(self) -> None:
        """Learn the newest recorded layout.

        Raises:
            CellsError: the layout cannot be read.
        """

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        """Record `after` as the layout that follows `before`. Return False if another layout
        follows it.

        Raises:
            CellsError: `after` may be recorded.
        """


class LayoutChanges:
    """Changes the layout of one log.

    Args:
        nodes: the storage nodes.
        layouts: the layouts of the log.
        folder: a name of the log that no other log has.
        copies: replicas that a chain should have.
        available: returns the storage nodes that may keep cells.
    """

    def __init__(
        self,
        nodes: CellNodes,
        layouts: Layouts,
        *,
        folder: str,
        copies: int,
        available: Callable[[], Sequence[NodeId]],
    ) -> None:
        self._nodes = nodes
        self._layouts = layouts
        self.folder = folder
        self.copies = copies
        self.available = available

    async def change(
        self,
        layout: CellLayout,
        revised: CellLayout,
        *,
        lost: Collection[Place] = (),
        adds: bool = False,
        only_if_better: bool = False,
    ) -> CellLayout | None:
        """Seal the replicas of a layout except lost ones, and record the next layout. Replicas that
        do not answer are not in the next layout.

        Args:
            layout: the layout to change.
            revised: what the next layout is made from: `layout`, or its replicas with other
                attributes.
            lost: replicas that are not asked.
            adds: whether chains with too few replicas get new ones.
            only_if_better: whether nothing is done if all chains would keep their replicas.

        Returns:
            The layout that was recorded. None: another process has recorded one, or
            `only_if_better` is set and all chains would keep their replicas.

        Raises:
            CellsError: too few replicas answer, or the layout may be recorded.
        """
        epoch = layout.epoch
        for _ in range(_SEALS_MAX):
            epoch += 1
            opened = await self._opened(epoch, lost) if adds else []
            if only_if_better:
                after = self._next(revised, epoch, layout.replicas, opened)
                if after is not None and after.chains == layout.chains:
                    return None
            asked = [replica for replica in sorted(layout.replicas) if replica not in lost]
            sealed, later = await self._seal([(node, s) for node, s in asked], epoch)
            if later > epoch:
                await self._layouts.renew()
                if self._layouts.layout.epoch > layout.epoch:
                    return None
                epoch = later
                continue
            return await self._record(layout, revised, epoch, sealed, opened)
        raise CellsError("other processes change the layout of the log")

    async def _record(
        self,
        layout: CellLayout,
        revised: CellLayout,
        epoch: int,
        sealed: Collection[Place],
        opened: Sequence[NodeId],
    ) -> CellLayout | None:
        for chain in layout.chains:
            left = [each for each in complete_of(chain) if (each.node, each.space) in sealed]
            if len(left) <= layout.lacking:
                raise CellsError("a chain has too few complete replicas that answer")
        after = self._next(revised, epoch, sealed, opened)
        if after is None:
            raise CellsError("a chain has too few complete replicas that answer")
        return after if await self._layouts.change(layout, after) else None

    def _next(
        self,
        revised: CellLayout,
        epoch: int,
        sealed: Collection[Place],
        opened: Sequence[NodeId],
    ) -> CellLayout | None:
        return repaired(
            revised,
            self.folder,
            epoch,
            sealed=sealed,
            available=self.available(),
            opened=opened,
            copies=self.copies,
        )

    async def _opened(self, epoch: int, lost: Collection[Place]) -> list[NodeId]:
        """Open a space on each node that may keep cells; return the nodes that did so."""
        space = space_of(self.folder, epoch)
        gone = {node for node, _ in lost}
        candidates = [node for node in self.available() if node not in gone]
        if not candidates:
            return []
        answers = await self._nodes.ask_all(
            [(node, CellsSeal(0, space, epoch, opens=True)) for node in candidates]
        )
        return [
            node
            for node, answer in zip(candidates, answers, strict=True)
            if answer is not None and answer.outcome is CellOutcome.DONE
        ]

    async def _seal(self, places: Sequence[Place], epoch: int) -> tuple[list[Place], int]:
        """Seal replicas. Return those that are sealed, and the greatest epoch that any replica
        knows.
        """
        if not places:
            return [], 0
        answers = await self._nodes.ask_all(
            [(node, CellsSeal(0, space, epoch)) for node, space in places]
        )
        sealed = [
            place
            for place, answer in zip(places, answers, strict=True)
            if answer is not None and answer.outcome is CellOutcome.DONE
        ]
        return sealed, max((each.epoch for each in answers if each is not None), default=0)
