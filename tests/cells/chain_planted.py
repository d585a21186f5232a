"""Bugs that the simulation of chains must catch, as changes of one line of the code."""

from __future__ import annotations

from indilog.runtime.cell_store import CellStore
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.stored_cells import StoredCells
from tests.cells.planted import Planted

CHAIN_BUGS = (
    Planted(
        "some contents are written to a chain in the reverse order", ChainCells, "_write_along",
        "layout.chain(key.position)", "layout.chain(key.position)[:: 1 - 2 * (len(content) % 2)]",
        seed=5,
    ),
    Planted(
        "an append is acknowledged when the head has it", ChainCells, "_write_along",
        "layout.chain(key.position)", "layout.chain(key.position)[:1]",
        seed=2,
    ),
    Planted(
        "a reader returns what only the head has", ChainCells, "_read_last",
        "if await self._write_along(layout, key, found.content):", "if True:",
        seed=3,
    ),
    Planted(
        "a cell is unwritten if the last replica says so", ChainCells, "_read_last",
        "for r in others]", "for r in others[:0]]",
        seed=2,
    ),
    Planted(
        "a storage node accepts an older epoch after a seal", CellStore, "_serve",
        "if _is_refused(question, known):", "if False:",
        seed=89,
    ),
    Planted(
        "a fill overwrites a content", CellStore, "_write",
        "if stored[1] == content:",
        "if len(content) < 10:\n"
        "            self._file.execute(\n"
        '                f"UPDATE cells SET content = ?, crc = ? {_WHERE}",\n'
        "                (content, crc, space, *_columns(key)),\n"
        "            )\n"
        "        if len(content) < 10 or stored[1] == content:",
        seed=17,
    ),
    Planted(
        "a trimmed cell can be written again", CellStore, "_write",
        "if key.position < _floor(self._file, space, key.section):", "if False:",
        seed=23,
    ),
    Planted(
        "a new replica counts as complete before it is filled", ChainUpkeep, "_copy_all",
        "await self._copy(layout, at, section, source, target)", "pass",
        seed=8,
    ),
    Planted(
        "a backup takes what one disk has", StoredCells, "_read",
        "count + damaged >= needed", "True",
        seed=4,
    ),
    Planted(
        "a lost replica stays in the layout", ChainUpkeep, "_is_lost",
        "return answer.outcome is CellOutcome.ABSENT", "return False",
        seed=33,
    ),
)  # fmt: skip
