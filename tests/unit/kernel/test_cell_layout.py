"""Layouts of logs over cells of storage nodes."""

from __future__ import annotations

from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, CellReplica, full_nodes, new_layout, repaired

A, B, C, D = (NodeId(f"storage-{n}") for n in range(4))


def shown(layout: CellLayout | None) -> list[str]:
    """Return each chain as the letters of its nodes; a small letter is filling."""
    assert layout is not None
    letters = dict(zip((A, B, C, D), "ABCD", strict=True))
    return [
        "".join(letters[r.node].lower() if r.is_filling else letters[r.node] for r in chain)
        for chain in layout.chains
    ]


def next_of(layout: CellLayout, lost: str, nodes: tuple[NodeId, ...]) -> CellLayout | None:
    gone = {node for node, letter in zip((A, B, C, D), "ABCD", strict=True) if letter in lost}
    sealed = [replica for replica in layout.replicas if replica[0] not in gone]
    opened = [node for node in nodes if node not in gone]
    return repaired(
        layout, "f", layout.epoch + 1, sealed=sealed, available=nodes, opened=opened, copies=2
    )


def test_each_node_is_the_head_of_one_chain() -> None:
    layout = new_layout("f", [A, B, C], 2)
    assert shown(layout) == ["AB", "BC", "CA"]
    assert layout.chain(4) == layout.chains[1]
    assert shown(new_layout("f", [A], 3)) == ["A"], "as many copies as there are nodes"


def test_a_layout_has_as_many_chains_as_it_should() -> None:
    assert shown(new_layout("f", [A, B], 2, 3)) == ["AB", "BA", "AB"]
    heads = {shown(new_layout(f"f{n}", [A, B, C], 2, 1))[0] for n in range(20)}
    assert heads == {"AB", "BC", "CA"}, "the logs are spread over the nodes"


def test_a_lost_node_is_replaced_by_one_that_is_to_be_filled() -> None:
    layout = new_layout("f", [A, B, C], 2)
    after = next_of(layout, "B", (A, B, C, D))
    assert shown(after) == ["Ad", "Cd", "CA"], "D has fewer chains than A"
    assert after is not None
    assert after.chain(0)[1] == CellReplica(D, "f@2", is_filling=True)
    assert shown(after.filled(3)) == ["AD", "CD", "CA"]


def test_without_another_node_the_chain_is_shorter() -> None:
    layout = new_layout("f", [A, B], 2)
    after = next_of(layout, "A", (A, B))
    assert shown(after) == ["B", "B"]
    assert after is not None
    returned = next_of(after, "", (A, B))
    assert shown(returned) == ["Ba", "Ba"]
    assert returned is not None
    assert {space for node, space in returned.replicas if node == A} == {"f@3"}, "it begins empty"


def test_a_chain_without_complete_replica_has_no_next_layout() -> None:
    layout = new_layout("f", [A, B, C], 2)
    filling = next_of(layout, "B", (A, B, C))
    assert shown(filling) == ["Ac", "Ca", "CA"]
    assert filling is not None
    assert next_of(filling, "A", (A, B, C)) is None, "C lacks what only A has of the first chain"


def test_a_node_that_leaves_stays_until_another_is_complete() -> None:
    layout = new_layout("f", [A, B], 1)
    assert shown(layout) == ["A", "B"]
    leaving = repaired(
        layout, "f", 2, sealed=layout.replicas, available=[B, C], opened=[B, C], copies=1
    )
    assert shown(leaving) == ["Ac", "B"]
    assert leaving is not None
    filled = leaving.filled(3)
    after = repaired(
        filled, "f", 4, sealed=filled.replicas, available=[B, C], opened=[B, C], copies=1
    )
    assert shown(after) == ["C", "B"]


def test_one_full_disk_stops_a_chain_that_needs_all_its_replicas() -> None:
    layout = new_layout("f", [A, B, C], 2)
    assert full_nodes(layout, {B, D}) == [B]
    assert full_nodes(layout, {D}) == []
    filling = next_of(layout, "B", (A, B, C, D))
    assert filling is not None
    assert full_nodes(filling, {D}) == [D], "cells are written to filling replicas, too"


def test_full_disks_stop_a_log_of_kind_owned_if_too_few_complete_replicas_are_left() -> None:
    complete = [CellReplica(node, "f@1") for node in (A, B, C)]
    filling = CellReplica(D, "f@1", is_filling=True)
    layout = CellLayout(1, ((*complete, filling),), "owner", 1)
    assert full_nodes(layout, {A}) == full_nodes(layout, {A, D}) == []
    assert full_nodes(layout, {A, B, D}) == [A, B]
    shorter = CellLayout(2, ((*complete[:2], filling),), "owner", 1)
    assert full_nodes(shorter, {D}) == []
    assert full_nodes(shorter, {A}) == [A], "both are needed for the ack quorum"
