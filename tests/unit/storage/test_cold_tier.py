"""When a storage node asks its cold store, and when it has nothing to do."""

from __future__ import annotations

from indilog.base.ids import Instant, NodeId, ShardId
from indilog.config import node_config
from indilog.kernel.cold import VERSION, ColdObject, ListObjects, ObjectsListed
from indilog.kernel.placement import Placement
from indilog.kernel.view import view_of
from indilog.roles.role import AskCold, Ignore
from indilog_storage.checkpoint import Covered
from indilog_storage.cold_tier import ColdObjectsKept, ColdTier
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering

T0 = Instant(100.0)
OBJECT = ColdObject(VERSION, 7, ShardId(0), 0, 3, 1000, 1)


def started() -> ColdTier:
    """Return the tier of a node without records."""
    moved = MovedShards(NodeId("storage-0"), Placement(view_of(storage_nodes=1, replicas=1)))
    config = node_config(cold_place="/cold", cold_after_s=60.0, cold_retry_s=5.0)
    tier = ColdTier(ColdObjectsKept(), moved, Ordering(), Covered(), config)
    assert tier.deadline() is None, "recovery has not ended"
    tier.start(T0)
    return tier


def test_an_idle_tier_lists_its_objects_once_and_then_looks_for_records_each_second() -> None:
    tier = started()
    assert tier.deadline() == T0
    assert tier.conclude(T0) == [AskCold(ListObjects(is_first=True))]
    assert tier.deadline() is None, "it waits for the list"
    assert tier.conclude(Instant(T0 + 9.0)) == []
    assert tier.on_answer(ObjectsListed(()), T0) == []
    assert tier.deadline() == T0
    assert tier.conclude(T0) == []
    assert tier.deadline() == T0 + 1.0
    assert tier.conclude(Instant(T0 + 1.0)) == []
    assert tier.deadline() == T0 + 2.0


def test_a_store_that_does_not_answer_is_asked_again_after_a_pause() -> None:
    tier = started()
    tier.conclude(T0)
    assert tier.on_answer(ObjectsListed(None), T0) == []
    assert tier.deadline() == T0 + 5.0
    assert tier.conclude(Instant(T0 + 4.9)) == []
    assert tier.conclude(Instant(T0 + 5.0)) == [AskCold(ListObjects(is_first=True))]


def test_an_object_without_a_note_stays_if_the_node_lacks_its_records() -> None:
    """It may be the only copy of them."""
    tier = started()
    tier.conclude(T0)
    (effect,) = tier.on_answer(ObjectsListed([OBJECT]), T0)
    assert isinstance(effect, Ignore)
    assert effect.event == OBJECT
