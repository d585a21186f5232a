"""Reads the cells of a log from the disks of its storage nodes, and writes nothing (decision 0094).

The platform may run, or may have stopped or crashed at any time. So a cell may be on some replicas
only, and the layout may be replaced while it is read. A content counts if so many complete replicas
have it that every later layout has it, too: a change of the layout seals more than
`CellLayout.lacking` of them. Whatever was acknowledged before the layout was read is on so many.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from indilog.base.errors import DataLossError
from indilog.kernel.cell_layout import CellLayout, Chain, complete_of
from indilog.wire.cell_messages import CellKey, CellOutcome, CellSection, CellWanted
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.index import GENERATION_LIMITS, GenerationLimits
from indilog_cells.layout_changes import CellNodes


class FixedLayout:
    """The `Layouts` of a log whose layout does not change."""

    def __init__(self, layout: CellLayout) -> None:
        self.layout = layout

    async def renew(self) -> None:
        """See `Layouts.renew`: there is no later layout."""

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        """See `Layouts.change`."""
        raise AssertionError(f"{before} stays, and is not replaced by {after}")


def _no_part() -> int:
    raise AssertionError("no note is written")


class StoredCells(ChainCells):
    """The cells and notes of one log, for reading.

    Args:
        nodes: answers questions from the disks of storage nodes, whatever the epoch is.
        layout: a layout of the log. Each acknowledged cell was written in it or before.
        generation_limits: see `ChainCells`.
    """

    def __init__(
        self,
        nodes: CellNodes,
        layout: CellLayout,
        *,
        generation_limits: GenerationLimits = GENERATION_LIMITS,
    ) -> None:
        super().__init__(
            nodes,
            FixedLayout(layout),
            part_bytes=1,
            new_part=_no_part,
            generation_limits=generation_limits,
        )
        self._layout = layout

    async def _read(self, key: CellKey, *, is_applied: bool = False) -> bytes | None:
        """Return the content that every later layout has; None: the cell is unwritten, or its
        content is still open.

        Raises:
            DataLossError: too few replicas are there, or the cell is damaged on them.
        """
        del is_applied
        chain = complete_of(self._layout.chain(key.position))
        asks = [(each.node, CellWanted(0, each.space, self._layout.epoch, key)) for each in chain]
        answers = await self._nodes.ask_all(asks)
        there = [each for each in answers if each is not None]
        there = [each for each in there if each.outcome is not CellOutcome.ABSENT]
        if len(there) <= self._layout.lacking:
            raise _too_few(chain)
        outcomes = Counter(each.outcome for each in there)
        if outcomes[CellOutcome.TRIMMED]:
            return b""
        damaged, needed = outcomes[CellOutcome.DAMAGED], len(there) - self._layout.lacking
        contents = Counter(each.content for each in there if each.outcome is CellOutcome.DONE)
        decided = [content for content, count in contents.items() if count + damaged >= needed]
        if len(decided) == 1:
            return decided[0]
        if decided or damaged >= needed:
            raise DataLossError(f"Cell {key.position} is damaged on the disks that have it.")
        return None

    async def _listed(
        self, layout: CellLayout, chain: Chain, section: CellSection
    ) -> list[CellKey]:
        """See `ChainCells._listed`. Lost replicas are skipped."""
        for replica in reversed(complete_of(chain)):
            with suppress(CellsError):
                return await super()._listed(layout, (replica,), section)
        raise _too_few(complete_of(chain))


def _too_few(chain: Chain) -> DataLossError:
    nodes = ", ".join(each.node for each in chain)
    return DataLossError(f"Too few disks of {nodes} have the log.")
