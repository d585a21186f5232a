"""Chains of storage nodes, one claim each; `test_chains` has their histories under faults."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, new_layout
from indilog.runtime.cell_store import CellStore
from indilog.wire.cell_messages import (
    CellAnswer,
    CellKey,
    CellOutcome,
    CellQuestion,
    CellsSeal,
    CellWanted,
    CellWrite,
)
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.layout_changes import Asks, LayoutChanges
from tests.cells.chain_world import in_turn, rows

A, B, C = (NodeId(f"storage-{n}") for n in range(3))

_FoundT = TypeVar("_FoundT")


@dataclass
class Cluster:
    """Storage nodes that answer at once, and the layouts."""

    layout: CellLayout
    stores: dict[NodeId, CellStore]
    recorded: CellLayout = field(init=False)
    down: set[NodeId] = field(default_factory=set)
    asked: list[tuple[NodeId, CellQuestion]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorded = self.layout

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        self.asked += asks
        return [
            None if node in self.down else self.stores[node].serve([question])[0]
            for node, question in asks
        ]

    async def renew(self) -> None:
        self.layout = self.recorded

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        if self.recorded != before:
            return False
        self.recorded = self.layout = after
        return True


def cluster(*nodes: NodeId, copies: int = 2) -> tuple[Cluster, ChainCells]:
    layout = new_layout("f", nodes, copies)
    stores = {node: CellStore(":memory:") for node in (A, B, C)}
    for node, space in layout.replicas:
        stores[node].serve([CellsSeal(0, space, 1, opens=True)])
    made = Cluster(layout, stores)
    numbers = itertools.count(1)
    return made, ChainCells(made, made, part_bytes=100, new_part=lambda: next(numbers))


def done(work: Coroutine[Any, Any, _FoundT]) -> _FoundT:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        found: _FoundT = ended.value
        return found
    raise AssertionError("it waits")


def test_a_write_goes_along_the_chain_and_a_read_asks_the_last_replica() -> None:
    nodes, cells = cluster(A, B)
    assert done(cells.write(0, b"x"))
    assert [node for node, _ in nodes.asked] == [A, B]
    assert done(cells.write(1, b"y"))
    assert [node for node, _ in nodes.asked[2:]] == [B, A], "the next chain has another head"
    nodes.asked.clear()
    assert done(cells.read(0)) == b"x"
    assert [node for node, _ in nodes.asked] == [B]


def test_of_two_contents_the_head_takes_one() -> None:
    _, cells = cluster(A, B)
    assert done(cells.write(0, b"x"))
    assert not done(cells.write(0, b"y"))
    assert done(cells.write(0, b"x")), "a repetition"
    assert done(cells.read(0)) == b"x"


def test_a_reader_completes_what_only_the_head_has() -> None:
    nodes, cells = cluster(A, B)
    nodes.stores[A].serve([CellWrite(0, "f@1", 1, CellKey(0, 0), b"half")])
    assert done(cells.read(0)) == b"half"
    (answer,) = nodes.stores[B].serve([CellWanted(0, "f@1", 1, CellKey(0, 0))])
    assert answer.content == b"half"


def test_a_cell_is_unwritten_only_if_all_replicas_say_so() -> None:
    nodes, cells = cluster(A, B)
    assert done(cells.read(0)) is None
    nodes.down = {A}
    with pytest.raises(CellsError):
        done(cells.read(0))


def test_an_applied_cell_is_read_from_any_replica() -> None:
    nodes, cells = cluster(A, B)
    for position in range(8):
        done(cells.write(position, b"%d" % position))
    nodes.asked.clear()
    assert [done(cells.read(p, is_applied=True)) for p in range(8)] == [b"%d" % p for p in range(8)]
    assert {node for node, _ in nodes.asked} == {A, B}
    for down in (A, B):
        nodes.down = {down}
        assert done(cells.read(5, is_applied=True)) == b"5"


def test_an_applied_cell_is_read_while_the_layout_is_changed() -> None:
    nodes, cells = cluster(A, B)
    assert done(cells.write(0, b"x"))
    for node, space in nodes.layout.replicas:
        nodes.stores[node].serve([CellsSeal(0, space, 2)])
    assert done(cells.read(0, is_applied=True)) == b"x"
    with pytest.raises(CellsError, match="the layout of the log is being changed"):
        done(cells.read(0))
    with pytest.raises(CellsError, match="the layout of the log is being changed"):
        done(cells.write(1, b"y"))


def test_a_damaged_cell_is_read_from_another_replica_and_repaired() -> None:
    nodes, cells = cluster(A, B)
    done(cells.write(0, b"right"))
    rows(nodes.stores[B], "UPDATE cells SET content = ?", b"wrong")
    assert done(cells.read(0, is_applied=True)) == b"right"
    assert done(cells.read(0)) == b"right"
    (answer,) = nodes.stores[B].serve([CellWanted(0, "f@1", 1, CellKey(0, 0))])
    assert answer.outcome is CellOutcome.DONE


def test_trimmed_cells_read_as_empty_and_take_nothing() -> None:
    _, cells = cluster(A, B)
    for position in range(4):
        done(cells.write(position, b"x"))
    done(cells.trim(0, 3))
    assert [done(cells.read(p)) for p in range(4)] == [b"", b"", b"", b"x"]
    assert not done(cells.write(1, b"y"))


def test_notes_of_any_length_are_kept_listed_and_dropped() -> None:
    nodes, cells = cluster(A, B, C)
    notes = {start: bytes([start]) * (start * 60 + 1) for start in (0, 1, 5)}
    for start, content in notes.items():
        done(cells.write_generation(start, content))
        done(cells.write_generation(start, b"another"))
    assert done(cells.generations()) == [0, 1, 5]
    assert {start: done(cells.read_generation(start)) for start in notes} == notes
    for position in (2, 7, 11):
        done(cells.write_checkpoint(position, b"%d" % position * 120))
    assert done(cells.newest_checkpoint()) == b"11" * 120
    done(cells.drop_generation(1))
    assert done(cells.generations()) == [5]
    assert done(cells.read_generation(1)) is None
    stored = {row for store in nodes.stores.values() for row in rows(
        store, "SELECT section, position FROM cells"
    )}  # fmt: skip
    assert stored == {(1, 5), (2, 7), (2, 11)}, "parts are freed with their note"


# --- layouts


def keeper(nodes: Cluster, cells: ChainCells, clock: list[float]) -> ChainUpkeep[ChainCells]:
    changes = LayoutChanges(nodes, nodes, folder="f", copies=2, available=lambda: [A, B, C])
    return ChainUpkeep(
        cells, nodes, nodes, changes, in_turn, replace_after_s=5.0, clock=lambda: clock[0]
    )


def test_a_lost_node_is_replaced_and_its_successor_is_filled() -> None:
    nodes, cells = cluster(A, B, C)
    for position in range(12):
        assert done(cells.write(position, b"%d" % position))
    done(cells.write_generation(3, b"g" * 300))
    done(cells.trim(0, 2))
    clock = [0.0]
    upkeep = keeper(nodes, cells, clock)
    nodes.down = {B}
    done(upkeep.check())
    clock[0] = 4.9
    done(upkeep.check())
    assert nodes.layout.epoch == 1, "the node may return"
    clock[0] = 5.0
    done(upkeep.check())
    assert nodes.layout.epoch == 2
    assert nodes.layout.is_filling
    assert done(cells.write(12, b"12")), "appends go on"
    done(upkeep.check())
    assert (nodes.layout.epoch, nodes.layout.is_filling) == (3, False)
    for down in (A, C):
        nodes.down = {B, down}
        found = [done(cells.read(p, is_applied=True)) for p in range(13)]
        assert found == [b"", b"", *(b"%d" % p for p in range(2, 13))]
        assert done(cells.read_generation(3)) == b"g" * 300


def test_a_client_of_an_earlier_layout_is_refused_and_follows() -> None:
    nodes, cells = cluster(A, B, C)
    old = Cluster(nodes.layout, nodes.stores)
    late = ChainCells(old, old, part_bytes=100, new_part=lambda: 1)
    done(late.write(0, b"x"))
    clock = [0.0]
    upkeep = keeper(nodes, cells, clock)
    nodes.down = {B}
    done(upkeep.check())
    clock[0] = 9.0
    done(upkeep.check())
    assert done(cells.write(3, b"new"))
    with pytest.raises(CellsError, match="is being changed"):
        done(late.read(3))  # B, which only this client reaches, would say that it is unwritten
    old.recorded = nodes.recorded
    assert done(late.read(3)) == b"new"


def test_a_disk_without_the_log_is_replaced_at_once() -> None:
    nodes, cells = cluster(A, B, C)
    done(cells.write(0, b"x"))
    nodes.stores[A] = CellStore(":memory:")
    with pytest.raises(CellsError, match="storage-0 has lost the log"):
        done(cells.write(3, b"y"))
    upkeep = keeper(nodes, cells, [0.0])
    for _ in range(6):
        done(upkeep.check())
    assert not nodes.layout.is_filling
    assert {len(chain) for chain in nodes.layout.chains} == {2}
    assert done(cells.read(0)) == b"x"


def test_an_interrupted_change_is_finished() -> None:
    nodes, cells = cluster(A, B, C)
    done(cells.write(0, b"x"))
    for store in nodes.stores.values():
        store.serve([CellsSeal(0, "f@1", 2)])  # a process sealed, and crashed
    with pytest.raises(CellsError, match="is being changed"):
        done(cells.write(1, b"y"))
    done(keeper(nodes, cells, [0.0]).check())
    assert nodes.layout.epoch == 2
    assert done(cells.write(1, b"y"))


def test_the_log_is_not_continued_without_what_was_acknowledged() -> None:
    nodes, cells = cluster(A, B)
    done(cells.write(0, b"x"))
    nodes.stores[A], nodes.stores[B] = CellStore(":memory:"), CellStore(":memory:")
    upkeep = keeper(nodes, cells, [0.0])
    with pytest.raises(CellsError, match="too few complete replicas"):
        done(upkeep.check())
    with pytest.raises(CellsError, match="has lost the log"):
        done(cells.read(0))
