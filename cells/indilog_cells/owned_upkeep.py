"""Upkeep of the layout of a log that one process at a time appends to (decision 0090).

An acknowledged cell may be missing on at most `CellLayout.lacking` complete replicas. So each
change of the layout seals at least `lacking + 1` complete replicas; so does the change that makes
filled replicas complete. Before `lacking` is lowered, or replicas become complete, all cells that
were acknowledged earlier are copied to all complete replicas (`OwnedCells.recover`).
"""

from __future__ import annotations

from indilog.kernel.cell_layout import CellLayout, lacking_of
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.layout_changes import Place
from indilog_cells.owned_cells import OwnedCells


class OwnedUpkeep(ChainUpkeep[OwnedCells]):
    """Checks the layout of one log; arguments are those of `ChainUpkeep`."""

    def _late(self) -> set[Place]:
        return self._cells.late()

    async def _fill(self, layout: CellLayout) -> None:
        await self._cells.recover(layout)
        await self._copy_all(layout)
        await self._record_complete(layout)

    async def _settle(self, layout: CellLayout) -> None:
        """Set `lacking` to its normal value, after replicas were left out or became complete."""
        if layout.lacking != lacking_of(len(layout.complete)):
            await self._cells.recover(layout)
            await self._record_complete(layout)

    async def _record_complete(self, layout: CellLayout) -> None:
        """Record that all replicas are complete, and on how many of them an acknowledged cell may
        be missing.
        """
        count = len(layout.chains[0])
        # A cell that was acknowledged since `recover` may be missing on the replicas outside of
        # the ack quorum.
        lacking = max(count - layout.ack_quorum, lacking_of(count))
        filled = layout.filled(layout.epoch)
        revised = CellLayout(filled.epoch, filled.chains, filled.owner, lacking)
        if (after := await self._changes.change(layout, revised)) is not None:
            self._say_complete(after)
