"""A simulated log that one process at a time appends to, on the storage nodes of
`tests.cells.chain_world`. Its processes take the log from each other.

A storage node loses its disk only if enough other replicas keep what was acknowledged, and no
change of the layout is under way that could leave one of them out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, owned_layout
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.layout_changes import LayoutChanges, Place
from indilog_cells.owned_cells import OwnedCells
from indilog_cells.owned_upkeep import OwnedUpkeep
from indilog_cells.sequencer import TokenSequencer
from tests.cells.chain_world import (
    CHECK_US,
    FOLDER,
    NODES,
    REPLACE_S,
    ChainProcess,
    ChainWorld,
    Keeper,
    Net,
    cells_of,
    in_turn,
    new_part,
)
from tests.cells.world import Process

RECORDED_US = 200_000
"""So long after its process crashed a layout may still be recorded."""


class OwnedWorld(ChainWorld):
    """A run of one seed; see `ChainWorld`.

    Attributes:
        copies: replicas of a cell.
        keeps_us: how long a process keeps the log at least, in microseconds.
        window: of `OwnedCells`.
        changing: changes of the layout that are under way.
        changed_us: when the last one ended, or its process crashed.
    """

    def __init__(self, seed: int, **sizes: int) -> None:
        self.copies = [1, 2, 3, 3, 3, 3, 4][seed % 7]
        self.changing = 0
        self.changed_us = 0
        super().__init__(seed, **sizes)
        self.keeps_us = self.random.choice([0, 30_000, 200_000, 1_000_000])
        self.window = self.random.choice([10, 16, 40])

    def first_layout(self) -> CellLayout:
        return owned_layout(FOLDER, NODES, self.copies)

    def made_process(self, number: int) -> Process:
        return OwnedProcess(self, number)

    def made_keeper(self) -> Keeper:
        return OwnedKeeper(self)

    def _may_lose(self, node: NodeId) -> bool:
        if self.changing or self.now_us < self.changed_us + RECORDED_US:
            return False
        left = [
            each
            for each in self.layout.complete
            if each.node != node and self._has(each.node, each.space)
        ]
        return len(left) > self.layout.lacking

    def faults_at_end(self) -> list[str]:
        """Return what is wrong with the cells of the last layout, and complete `store.first`."""
        found = self.copy_faults[:]
        layout = self.layout
        kept = {
            each: cells_of(self.nodes[each.node].store, each.space) for each in layout.chains[0]
        }
        end = max([*self.store.first, *(p for has, _ in kept.values() for p in has), 0]) + 1
        for position in range(max(floor for _, floor in kept.values()), end):
            contents = {has[position] for has, _ in kept.values() if position in has}
            count = sum(position in kept[each][0] for each in layout.complete)
            if len(contents) > 1:
                found.append(f"cell {position} has {len(contents)} contents")
            elif (seen := self.store.first.get(position)) is None:
                if count:
                    self.store.first[position] = contents.pop()
            elif contents != {seen}:
                found.append(f"cell {position} is lost, or has another content")
            elif count < len(layout.complete) - layout.lacking:
                found.append(f"cell {position} is on {count} replicas only")
        return found


class Changes(LayoutChanges):
    """Changes of the layout, which the world knows of."""

    def __init__(self, net: Net, world: OwnedWorld) -> None:
        super().__init__(net, net, folder=FOLDER, copies=world.copies, available=lambda: NODES)
        self._world = world

    async def change(
        self,
        layout: CellLayout,
        revised: CellLayout,
        *,
        lost: Collection[Place] = (),
        adds: bool = False,
        only_if_better: bool = False,
    ) -> CellLayout | None:
        self._world.changing += 1
        try:
            return await super().change(
                layout, revised, lost=lost, adds=adds, only_if_better=only_if_better
            )
        finally:
            self._world.changing -= 1
            self._world.changed_us = self._world.now_us


@dataclass
class OwnedProcess(ChainProcess):
    """A process that takes the log from the others."""

    owner: str = ""
    since_us: int = 0
    upkeep: OwnedUpkeep = field(init=False)
    tokens: TokenSequencer = field(init=False)

    def start(self) -> None:
        self.tokens = TokenSequencer()
        super().start()
        assert isinstance(self.cells, OwnedCells)
        self.upkeep = upkeep_of(self.cells, self.net, self.owned)
        self._check(self.incarnation)

    @property
    def sequencer(self) -> TokenSequencer:
        """A sequencer of this process alone, as in a platform: other processes race for cells."""
        return self.tokens

    def _check(self, own: int) -> None:
        """Check the layout and repair what replicas lack, as the owner does, periodically."""
        if own == self.incarnation:
            again = partial(self._check, own)
            self._run(self._care(), lambda _: self.world.after(CHECK_US, again))

    async def _care(self) -> None:
        cells = self.cells
        assert isinstance(cells, OwnedCells)
        if cells.is_owner:
            await self.upkeep.check()
        await cells.repair()

    def made_cells(self) -> ChainCells:
        world = self.owned
        return OwnedCells(
            self.net,
            self.net,
            Changes(self.net, world),
            owner=f"{self.number}/{self.incarnation}",
            may_claim=self._may_claim,
            part_bytes=1 << 20,
            new_part=new_part(),
            window=world.window,
        )

    @property
    def owned(self) -> OwnedWorld:
        assert isinstance(self.world, OwnedWorld)
        return self.world

    def _may_claim(self, owner: str) -> bool:
        if owner != self.owner:
            self.owner, self.since_us = owner, self.world.now_us
        return self.world.now_us - self.since_us >= self.owned.keeps_us


class OwnedKeeper(Keeper):
    """Checks the layout of the log."""

    def made_upkeep(self) -> ChainUpkeep[Any]:
        world = self.world
        assert isinstance(world, OwnedWorld)
        changes = Changes(self.net, world)
        cells = OwnedCells(
            self.net, self.net, changes, owner="", may_claim=lambda _: False,
            part_bytes=1 << 20, new_part=new_part(), window=world.window,
        )  # fmt: skip
        return upkeep_of(cells, self.net, world)


def upkeep_of(cells: OwnedCells, net: Net, world: OwnedWorld) -> OwnedUpkeep:
    """Return the upkeep of the layout for one process."""
    return OwnedUpkeep(
        cells,
        net,
        net,
        Changes(net, world),
        in_turn,
        replace_after_s=REPLACE_S,
        clock=lambda: world.now_us / 1e6,
    )
