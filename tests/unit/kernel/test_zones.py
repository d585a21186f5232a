"""Zones of nodes, and the choice of nodes in different ones (`indilog.kernel.zones`)."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId, ShardId
from indilog.config import node_config
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.placement import Placement
from indilog.kernel.view import View, view_of, view_with
from indilog.kernel.zones import is_label, shares_zones, spread_over_zones

A, B, C, D, E = (NodeId(f"storage-{number}") for number in range(5))
EAST, WEST = "east", "west"


def test_nodes_are_chosen_in_different_zones_the_best_first() -> None:
    zones = {A: EAST, B: EAST, C: WEST, D: EAST}
    assert spread_over_zones((A, B, C, D), 2, zones) == (A, C)
    assert spread_over_zones((A, B, C, D), 3, zones) == (A, C, B)
    assert spread_over_zones((A, B, C, D), 1, zones, beside=(B,)) == (C,)
    assert spread_over_zones((A, B), 3, zones) == (A, B)


def test_without_zones_the_first_nodes_are_chosen() -> None:
    assert spread_over_zones((C, A, B), 2, {}) == (C, A)


def test_nodes_without_zone_are_in_one_zone() -> None:
    assert spread_over_zones((A, B, C), 2, {C: WEST}) == (A, C)


def test_replicas_share_a_zone_only_if_others_exist() -> None:
    nodes = (A, B, C, D)
    zones = {A: EAST, B: EAST, C: WEST, D: WEST}
    assert shares_zones((A, B), nodes, zones)
    assert not shares_zones((A, C), nodes, zones)
    assert not shares_zones((A, C, B), nodes, zones), "three replicas in the two zones"
    assert not shares_zones((A, B), nodes, {})


def test_the_first_view_places_replicas_in_different_zones() -> None:
    zones = {A: EAST, B: EAST, C: WEST, D: WEST}
    view = view_of(storage_nodes=4, replicas=2, engines=4, zones=zones)
    assert [placed.replicas for placed in view.shards.values()] == [(A, C), (B, C), (C, A), (D, A)]
    assert view_of(storage_nodes=4, replicas=2, engines=4).shards[ShardId(0)].replicas == (A, B)


def following(view: View, **changes: object) -> View:
    members = msgspec.structs.replace(view.members, version=view.members_version + 1, **changes)
    placement = Placement(view)
    return view_with(view, members, 40, placement.replicas, lambda _: NO_INCARNATION)


def test_a_new_shard_is_placed_in_different_zones() -> None:
    zones = {A: EAST, B: EAST, C: WEST, D: EAST, E: EAST}
    view = view_of(sequencers=3, storage_nodes=5, replicas=2, zones=zones)
    assert view.shards[ShardId(0)].replicas == (A, C)
    engines = (*view.engines, NodeId("engine-1"))
    assert following(view, engines=engines).shards[ShardId(1)].replicas == (B, C)


def test_a_view_gets_zones_and_forgets_those_of_nodes_that_left() -> None:
    view = view_of(sequencers=3, storage_nodes=3, replicas=2, zones={A: EAST, C: WEST})
    labelled = following(view, zones={A: EAST, C: WEST, B: WEST, E: EAST})
    assert labelled.number == view.number + 1
    assert labelled.zones == {A: EAST, B: WEST, C: WEST}, "E is no node of the view"
    left = following(labelled, storage_nodes=(A, B))
    assert left.zones == {A: EAST, B: WEST}


@pytest.mark.parametrize("zone", ["", "a,b", "x" * 65, "a\nb"])
def test_a_label_is_short_printable_text(zone: str) -> None:
    assert not is_label(zone)
    view = view_of(storage_nodes=2)
    with pytest.raises(ConfigError, match="label of a zone"):
        msgspec.structs.replace(view, zones={A: zone}).check()


def test_the_setting_zone_lists_labels() -> None:
    assert node_config(zone="east, west").zones == (EAST, WEST)
    assert node_config().zones == ()
    with pytest.raises(ConfigError, match="1 to 64 bytes"):
        node_config(zone="x" * 65)
