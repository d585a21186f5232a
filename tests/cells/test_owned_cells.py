"""Cells of one owner at a time, one claim each; `test_owned` has their histories under faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, CellReplica, owned_layout
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
from indilog_cells.layout_changes import Asks, LayoutChanges
from indilog_cells.owned_cells import DeposedError, Elsewhere, OwnedCells, Tenure
from indilog_cells.owned_upkeep import OwnedUpkeep
from tests.cells.chain_world import in_turn, rows
from tests.cells.test_chain_cells import Cluster, done

NODES = [NodeId(f"storage-{n}") for n in range(4)]


@dataclass
class OwnedCluster(Cluster):
    """Storage nodes that answer at once; pauses take no time."""

    paused_s: float = 0.0

    async def ask_until(self, asks: Asks, heard: Callable[[int, CellAnswer | None], bool]) -> None:
        self.tell(asks, heard)

    def tell(self, asks: Asks, heard: Callable[[int, CellAnswer | None], object]) -> None:
        for at, answer in enumerate(done(self.ask_all(asks))):
            heard(at, answer)

    async def run_all(self, works: Sequence[Coroutine[Any, Any, object]]) -> None:
        await in_turn(works)

    async def pause(self, seconds: float) -> None:
        self.paused_s += seconds

    def client(self, owner: str, *, may_claim: bool = True, window: int = 16) -> OwnedCells:
        """Return the cells for another process, which has read the recorded layouts."""
        own = OwnedCluster(self.recorded, self.stores, down=self.down)
        own.follows = self
        numbers = itertools.count(1)
        owners = itertools.chain([owner], (f"{owner}.{n}" for n in itertools.count(2)))
        return OwnedCells(
            own, own, changes(own), new_owner=lambda: next(owners), may_claim=lambda _: may_claim,
            part_bytes=100, new_part=lambda: next(numbers), window=window,
        )  # fmt: skip

    follows: OwnedCluster | None = None
    """The cluster that has the recorded layout, if it is not this one."""

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        if self.follows is None:
            return await super().change(before, after)
        done = await self.follows.change(before, after)
        await self.renew()
        return done

    async def renew(self) -> None:
        self.layout = self.recorded if self.follows is None else self.follows.recorded

    def has(self, node: NodeId, position: int) -> bytes | None:
        """Return what a node has in a cell."""
        (space,) = {s for n, s in self.recorded.replicas if n == node}
        question = CellWanted(0, space, self.recorded.epoch, CellKey(0, position))
        (answer,) = self.stores[node].serve([question])
        return answer.content if answer.outcome is CellOutcome.DONE else None


async def write(cells: OwnedCells, position: int, content: bytes) -> bool:
    """Become the owner if necessary, and write."""
    found = await cells.acquire()
    assert isinstance(found, Tenure), f"{found} is the owner"
    cells.tenure = found
    return await cells.write(position, content)


def changes(nodes: Cluster, copies: int = 3) -> LayoutChanges:
    return LayoutChanges(nodes, nodes, folder="f", copies=copies, available=lambda: NODES)


def cluster(copies: int = 3) -> OwnedCluster:
    layout = owned_layout("f", NODES, copies)
    stores = {node: CellStore(":memory:") for node in NODES}
    for node, space in layout.replicas:
        stores[node].serve([CellsSeal(0, space, 1, opens=True)])
    return OwnedCluster(layout, stores)


def chain(nodes: OwnedCluster) -> list[NodeId]:
    return [each.node for each in nodes.recorded.chains[0]]


def put(nodes: OwnedCluster, node: NodeId, position: int, content: bytes) -> None:
    """Write a cell on one node only, in the recorded epoch."""
    (space,) = {s for n, s in nodes.recorded.replicas if n == node}
    question: CellQuestion = CellWrite(
        0, space, nodes.recorded.epoch, CellKey(0, position), content
    )
    (answer,) = nodes.stores[node].serve([question])
    assert answer.outcome is CellOutcome.DONE


@pytest.mark.parametrize(
    ("copies", "acks", "reads", "seals"), [(1, 1, 1, 1), (2, 2, 2, 1), (3, 2, 2, 2), (4, 3, 3, 2)]
)
def test_quorums(copies: int, acks: int, reads: int, seals: int) -> None:
    layout = owned_layout("f", NODES, copies)
    assert (layout.ack_quorum, layout.read_quorum, layout.lacking + 1) == (acks, reads, seals)


def test_quorums_meet_in_each_layout() -> None:
    for count in range(1, 6):
        for lacking in range(count):
            replicas = owned_layout("f", [NodeId(f"s{n}") for n in range(count)], count).chains
            layout = CellLayout(1, replicas, "", lacking)
            seals = lacking + 1
            assert layout.ack_quorum + seals > count
            assert layout.read_quorum + seals > count
            assert layout.ack_quorum + layout.read_quorum > count
            assert layout.ack_quorum <= count >= layout.read_quorum


def test_a_write_is_done_when_two_of_three_have_it() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    assert done(write(cells, 0, b"x"))
    assert nodes.recorded.owner == "a"
    assert [nodes.has(node, 0) for node in chain(nodes)] == [b"x"] * 3
    nodes.down.add(chain(nodes)[0])
    assert done(write(cells, 1, b"y"))
    nodes.down.add(chain(nodes)[1])
    with pytest.raises(CellsError):
        done(write(cells, 2, b"z"))


def test_an_earlier_owner_completes_no_write() -> None:
    nodes = cluster()
    first, second = nodes.client("a"), nodes.client("b")
    assert done(write(first, 0, b"x"))
    assert not done(write(second, 0, b"y")), "the cell is taken"
    assert done(write(second, 1, b"y"))
    done(first._layouts.renew())
    assert not first.appends_in("a")
    with pytest.raises(DeposedError):
        done(first.write(1, b"x1"))
    assert done(second.read(1)) == b"y"


def test_a_write_of_an_earlier_tenure_is_given_up_in_a_later_one() -> None:
    nodes = cluster()
    first, second = nodes.client("a"), nodes.client("b")
    assert done(write(first, 0, b"x"))
    late = first.write_in(first.tenure, 1, b"late")
    assert done(write(second, 1, b"y"))
    done(first._layouts.renew())
    assert done(write(first, 2, b"z"))
    assert nodes.recorded.owner == "a.2"
    with pytest.raises(DeposedError):
        done(late)
    assert [done(first.read(position)) for position in range(1, 4)] == [b"y", b"z", None]


def test_a_process_asks_the_owner_until_the_owner_does_not_append() -> None:
    nodes = cluster()
    assert done(write(nodes.client("a"), 0, b"x"))
    second = nodes.client("b", may_claim=False)
    assert done(second.acquire()) == Elsewhere("a")
    second.give_up_on("other")
    assert done(second.acquire()) == Elsewhere("a")
    second.give_up_on("a")
    assert done(second.acquire()) == Tenure("b")
    assert done(write(second, 1, b"y"))
    assert nodes.recorded.owner == "b"


def test_a_claim_copies_what_one_replica_has() -> None:
    for holder in range(3):
        nodes = cluster()
        assert done(write(nodes.client("a"), 0, b"x"))
        put(nodes, chain(nodes)[holder], 1, b"alone")
        second = nodes.client("b")
        assert not done(write(second, 1, b"y"))
        assert done(second.read(1)) == b"alone"
        assert [nodes.has(node, 1) for node in chain(nodes)] == [b"alone"] * 3


def test_a_claim_leaves_out_what_it_does_not_seal() -> None:
    nodes = cluster()
    assert done(write(nodes.client("a"), 0, b"x"))
    lost = chain(nodes)[0]
    put(nodes, lost, 1, b"alone")
    nodes.down.add(lost)
    second = nodes.client("b")
    assert done(write(second, 1, b"y")), "no quorum had another content"
    nodes.down.clear()
    assert lost not in chain(nodes)
    assert done(nodes.client("c").read(1)) == b"y"


def test_a_claim_needs_enough_replicas() -> None:
    nodes = cluster()
    assert done(write(nodes.client("a"), 0, b"x"))
    nodes.down.update(chain(nodes)[:2])
    with pytest.raises(CellsError, match="too few complete replicas"):
        done(write(nodes.client("b"), 1, b"y"))
    nodes.down.clear()
    assert done(write(nodes.client("b"), 1, b"y"))


def test_a_reader_completes_what_it_shows() -> None:
    nodes = cluster()
    assert done(write(nodes.client("a"), 0, b"x"))
    put(nodes, chain(nodes)[0], 1, b"alone")
    nodes.down.add(chain(nodes)[2])
    reader = nodes.client("r", may_claim=False)
    assert done(reader.read(1)) == b"alone"
    assert nodes.has(chain(nodes)[1], 1) == b"alone"
    assert done(reader.read(2)) is None
    nodes.down.add(chain(nodes)[1])
    with pytest.raises(CellsError):
        done(reader.read(2))


def test_a_cell_gets_one_content_of_one_owner() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    assert done(write(cells, 0, b"x"))
    names = chain(nodes)
    nodes.down.update(names[:2])
    with pytest.raises(CellsError):
        done(write(cells, 1, b"first"))
    nodes.down.clear()
    assert not done(write(cells, 1, b"second"))
    assert [nodes.has(node, 1) for node in names] == [b"first"] * 3


def test_an_owner_waits_for_a_replica_that_is_a_window_behind_and_repairs_it() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    assert done(write(cells, 0, b"0"))
    slow = chain(nodes)[2]
    nodes.down.add(slow)
    for position in range(1, 17):
        assert done(write(cells, position, b"%d" % position))
    assert {node for node, _ in cells.late()} == {slow}
    with pytest.raises(CellsError, match="too slow"):
        done(write(cells, 17, b"17"))
    nodes.down.clear()
    done(cells.repair())
    assert cells.late() == set()
    assert [nodes.has(slow, p) for p in range(17)] == [b"%d" % p for p in range(17)]
    assert done(write(cells, 17, b"17"))


def test_trimmed_cells_take_nothing() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    for position in range(4):
        assert done(write(cells, position, b"x"))
    done(cells.trim(0, 3))
    assert [done(cells.read(p)) for p in range(4)] == [b"", b"", b"", b"x"]
    assert not done(write(cells, 1, b"y"))


def test_a_damaged_cell_is_read_from_others_and_repaired() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    assert done(write(cells, 0, b"right"))
    hurt = chain(nodes)[0]
    rows(nodes.stores[hurt], "UPDATE cells SET content = ?", b"wrong")
    assert done(cells.read(0)) == b"right"
    done(cells.complete(CellKey(0, 0)))
    assert nodes.has(hurt, 0) == b"right"


def upkeep(nodes: OwnedCluster, cells: OwnedCells, clock: list[float]) -> OwnedUpkeep:
    own = cells._nodes
    assert isinstance(own, OwnedCluster)
    return OwnedUpkeep(
        cells, own, own, changes(own), in_turn, replace_after_s=5.0, clock=lambda: clock[0]
    )


def test_a_lost_node_is_replaced_and_quorums_are_those_of_three_again() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    for position in range(40):
        assert done(write(cells, position, b"%d" % position))
    clock = [0.0]
    keeper = upkeep(nodes, cells, clock)
    lost = chain(nodes)[1]
    nodes.down.add(lost)
    done(keeper.check())
    assert nodes.recorded.epoch == 2, "the node may return"
    clock[0] = 5.0
    done(keeper.check())
    assert nodes.recorded.is_filling
    assert nodes.recorded.owner == "a"
    assert done(write(cells, 40, b"40")), "appends go on"
    done(keeper.check())
    layout = nodes.recorded
    assert (layout.is_filling, len(layout.complete), layout.lacking) == (False, 3, 1)
    assert lost not in chain(nodes)
    for node in chain(nodes):
        assert [nodes.has(node, p) for p in range(41)] == [b"%d" % p for p in range(41)]
    nodes.down.add(layout.chains[0][0].node)
    assert done(write(cells, 41, b"41"))


def test_from_one_replica_to_three() -> None:
    nodes = cluster(copies=1)
    cells = nodes.client("a")
    assert done(write(cells, 0, b"x"))
    keeper = upkeep(nodes, cells, [0.0])
    seen = []
    for position in range(1, 6):
        done(keeper.check())
        layout = nodes.recorded
        seen.append((len(layout.complete), layout.lacking))
        assert done(write(cells, position, b"x"))
    assert seen == [(1, 0), (3, 2), (3, 1), (3, 1), (3, 1)]
    assert (nodes.recorded.ack_quorum, nodes.recorded.lacking) == (2, 1)


def test_a_disk_without_the_log_is_left_out_at_once() -> None:
    nodes = cluster()
    cells = nodes.client("a")
    assert done(write(cells, 0, b"x"))
    lost = chain(nodes)[2]
    nodes.stores[lost] = CellStore(":memory:")
    assert done(write(cells, 1, b"y")), "two replicas have it"
    done(upkeep(nodes, cells, [0.0]).check())
    assert (lost, "f@1") not in nodes.recorded.replicas
    assert done(write(cells, 2, b"z"))


def test_a_replica_that_was_filling_does_not_count_in_a_seal() -> None:
    nodes = cluster()
    assert done(write(nodes.client("a"), 0, b"x"))
    first, second, third = nodes.recorded.chains[0]
    added = CellReplica(third.node, third.space, is_filling=True)
    layout = CellLayout(nodes.recorded.epoch, ((first, second, added),), "a", 1)
    nodes.recorded = nodes.layout = layout
    nodes.down.add(second.node)
    with pytest.raises(CellsError, match="too few complete replicas"):
        done(changes(nodes).change(layout, layout.filled(layout.epoch)))
