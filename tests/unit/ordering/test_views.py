"""How the primary installs views for the wanted nodes of the cluster (decision 0049), through its
sequencer role.
"""

from __future__ import annotations

import msgspec

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.kernel.metalog import (
    NO_INCARNATION,
    Entry,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
)
from indilog.kernel.placement import Placement
from indilog.kernel.view import Members, View, view_of, view_with
from indilog.roles.role import Event, MembersWanted, Received
from indilog.wire.messages import (
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    ShardWanted,
    TailIs,
    TailWanted,
)
from indilog.wire.sequencer_messages import MetalogAppend
from indilog_ordering.sequencer import Sequencer
from tests.unit.ordering.test_lost_storage import alive
from tests.unit.ordering.test_primary import (
    ENGINE,
    FIRST,
    SECOND,
    T0,
    elected,
    persisted,
    progress,
    reasons,
    sealed,
    sent,
    start,
    started,
    stored,
)

VIEW = view_of(sequencers=3, storage_nodes=3, replicas=2)
A, B, C = VIEW.storage_nodes
JOINING = NodeId("engine-1")


def wanted(version: int = 1, **changes: object) -> MembersWanted:
    return MembersWanted(msgspec.structs.replace(VIEW.members, version=version, **changes))


def primary() -> Sequencer:
    """A primary whose fence is committed."""
    node, _ = elected(VIEW)
    node.handle([persisted(1), stored(1)], T0)
    return node


def proposed(node: Sequencer, *events: object, now: Instant = T0) -> list[View]:
    appends = sent(node.handle(events, now), MetalogAppend)  # type: ignore[arg-type]
    found: list[View] = []
    for _, message in appends:
        views = (entry.following for entry in message.entries if isinstance(entry, NewView))
        found += [view for view in views if view not in found]
    return found


def test_a_primary_installs_the_view_that_has_the_wanted_nodes_once() -> None:
    node = primary()
    (view,) = proposed(node, wanted(engines=(ENGINE, JOINING)))
    assert view.engines == (ENGINE, JOINING)
    assert view.shard_written_by(JOINING) == ShardId(1)
    assert proposed(node, persisted(2), stored(2)) == []


def test_a_node_that_joins_gets_entries_the_view_and_its_shard() -> None:
    node = primary()
    proposed(node, wanted(engines=(ENGINE, JOINING)))
    effects = node.handle([persisted(2), stored(2)], T0)
    assert JOINING in {to for to, _ in sent(effects, MetalogEntries)}
    node.handle([Received(JOINING, TailWanted(7, VIEW.number), Epoch(6))], T0)
    effects = node.handle([sealed(3), sealed(3, sender=SECOND)], T0)
    ((_, tail),) = sent(effects, TailIs)
    assert tail.view is not None
    assert JOINING in tail.view.engines
    effects = node.handle([Received(JOINING, ShardWanted(ShardId(1), Epoch(6)), Epoch(6))], T0)
    ((_, message), *_) = sent(effects, MetalogAppend)
    assert [type(entry) for entry in message.entries] == [NewWriters]


def test_a_tail_has_no_view_if_the_engine_knows_the_newest() -> None:
    node = primary()
    node.handle([Received(ENGINE, TailWanted(7, VIEW.number), Epoch(1))], T0)
    effects = node.handle([sealed(3), sealed(3, sender=SECOND)], T0)
    ((_, tail),) = sent(effects, TailIs)
    assert tail.view is None


def test_a_shard_is_given_to_its_compute_node_only() -> None:
    node = primary()
    effects = node.handle([Received(JOINING, ShardWanted(ShardId(1), Epoch(6)), Epoch(6))], T0)
    assert reasons(effects) == ["a shard wanted by a node that is not its writer"]


def test_older_members_do_not_undo_newer_ones() -> None:
    node = primary()
    proposed(node, wanted(version=3, engines=(ENGINE, JOINING)))
    node.handle([persisted(2), stored(2)], T0)
    assert proposed(node, wanted(version=2)) == []


def test_members_that_no_cluster_can_have_are_ignored_with_the_reason() -> None:
    node = primary()
    effects = node.handle([wanted(storage_nodes=(A,), engines=(ENGINE, JOINING))], T0)
    assert reasons(effects) == ["2 replicas need as many storage nodes; there are 1."]
    assert node.handle([], T0) == []


def test_a_sole_sequencer_installs_no_view() -> None:
    node = started()
    start(node)
    members = Members((ENGINE, JOINING), view_of().storage_nodes, view_of().index_shards, (), 1)
    before = node.length
    node.handle([MembersWanted(members)], T0)
    assert node.length == before


def test_a_storage_node_that_leaves_is_first_replaced_in_its_shards() -> None:
    node = primary()
    entries: list[Entry] = []
    events: list[Event] = [wanted(storage_nodes=(B, C))]
    now = T0
    for _ in range(6):
        for _, message in sent(node.handle(events, now), MetalogAppend):
            entries += [entry for entry in message.entries if entry not in entries]
        events = [persisted(token) for token in range(node.committed + 1, node.length + 1)]
        events += [stored(node.length)]
        shards = (0,) if any(isinstance(entry, NewReplicas) for entry in entries) else ()
        now = Instant(now + 0.5)
        events += [alive(sender, node.length, *shards) for sender in (A, B, C)]
    changes = [
        entry.replicas[ShardId(0)]
        if isinstance(entry, NewReplicas)
        else entry.following.storage_nodes
        for entry in entries
        if isinstance(entry, NewReplicas | NewView)
    ]
    assert changes == [(A, B, C), (B, C, A), (B, C), (B, C)]


def test_a_compute_node_that_leaves_receives_the_entry_and_may_ask_for_it() -> None:
    node = primary()
    node.handle([wanted(engines=(ENGINE, JOINING))], T0)
    node.handle([persisted(2), stored(2)], T0)
    node.handle([wanted(version=2)], T0)
    effects = node.handle([persisted(3), stored(3)], T0)
    assert JOINING in {to for to, _ in sent(effects, MetalogEntries)}
    asked = Received(JOINING, MetalogWanted(2, Epoch(5), 9), Epoch(6))
    ((to, answer),) = sent(node.handle([asked], T0), MetalogEntries)
    assert (to, [type(entry) for entry in answer.entries]) == (JOINING, [NewView])
    node.handle([wanted(version=3, aggregators=(NodeId("aggregator-5"),))], T0)
    effects = node.handle([persisted(4), stored(4)], T0)
    assert JOINING not in {to for to, _ in sent(effects, MetalogEntries)}


def test_nothing_more_of_a_shard_is_ordered_when_a_view_takes_it_from_its_compute_node() -> None:
    """Its replicas may get more of it: the compute node applies the entry later."""
    members = msgspec.structs.replace(VIEW.members, engines=(ENGINE, JOINING), version=1)
    view = view_with(VIEW, members, 5, Placement(VIEW).replicas, lambda _: NO_INCARNATION)
    replicas = view.shards[ShardId(1)].replicas
    node, _ = elected(view)
    node.handle(commit(node), T0)

    def reported(count: int) -> list[Event]:
        stored = {ShardId(1): (Epoch(1), count)}
        message = ShardProgress(Epoch(5), stored, 100)
        return [Received(replica, message, Epoch(1)) for replica in replicas]

    effects = node.handle([*reported(3), wanted(version=2, engines=(ENGINE,))], T0)
    entries = [e for to, m in sent(effects, MetalogAppend) for e in m.entries if to == FIRST]
    assert [type(entry) for entry in entries] == [NewRecords, NewView], "what was reported before"
    assert isinstance(entries[-1], NewView)
    assert entries[-1].following.shards[ShardId(1)].ended == Epoch(1)
    node.handle(commit(node), T0)
    assert not sent(node.handle(reported(5), T0), MetalogAppend)
    later = NodeId("engine-2")
    node.handle([wanted(version=3, engines=(ENGINE, later))], T0)
    node.handle(commit(node), T0)
    effects = node.handle([Received(later, ShardWanted(ShardId(1), Epoch(8)), Epoch(8))], T0)
    ((_, message), *_) = sent(effects, MetalogAppend)
    assert [type(entry) for entry in message.entries] == [NewWriters]


def commit(node: Sequencer) -> list[Event]:
    """What commits all proposed entries."""
    tokens = range(node.committed + 1, node.length + 1)
    return [*map(persisted, tokens), stored(node.length)]


def test_a_second_storage_node_gets_no_shard_because_the_first_had_to_send_no_heartbeats() -> None:
    view = view_of(sequencers=3)
    node, _ = elected(view)
    node.handle([persisted(1), stored(1)], T0)
    now = T0
    for number in range(1, 60):
        now = Instant(now + 0.5)
        node.handle([progress(number, sender=A)], now)
        node.handle(commit(node), now)
    members = msgspec.structs.replace(view.members, storage_nodes=(A, B), version=1)
    effects = node.handle([MembersWanted(members)], now) + node.handle(commit(node), now)
    entries = [entry for _, message in sent(effects, MetalogAppend) for entry in message.entries]
    assert {type(entry) for entry in entries} == {NewView}


def test_the_next_primary_answers_a_compute_node_that_left() -> None:
    members = msgspec.structs.replace(VIEW.members, engines=(ENGINE, JOINING), version=1)
    two = view_with(VIEW, members, 5, Placement(VIEW).replicas, lambda _: NO_INCARNATION)
    one = msgspec.structs.replace(members, engines=(ENGINE,), version=2)
    node, _ = elected(view_with(two, one, 6, Placement(two).replicas, lambda _: NO_INCARNATION))
    node.handle([persisted(1), stored(1)], T0)
    asked = Received(JOINING, MetalogWanted(0, Epoch(0), 9), Epoch(6))
    assert [to for to, _ in sent(node.handle([asked], T0), MetalogEntries)] == [JOINING]


def test_a_cluster_that_merges_at_aggregators_keeps_one() -> None:
    node = primary()
    effects = node.handle([wanted(aggregators=())], T0)
    assert reasons(effects) == ["Lookups need an aggregator."]


# --- sequencers (decision 0053)


NEW = NodeId("sequencer-3")


def changing(*sequencers: NodeId) -> Sequencer:
    """A primary whose cluster is to have these sequencers; a view says so, which is committed."""
    node = primary()
    (view,) = proposed(node, wanted(sequencers=sequencers))
    assert view.sequencers == VIEW.sequencers, "nothing is known of the others yet"
    assert proposed(node, persisted(2), stored(2)) == []
    assert node.committed == 2
    return node


def test_a_sequencer_that_is_to_join_gets_entries_and_then_a_vote() -> None:
    first, *others = VIEW.sequencers
    node = changing(*others, NEW)
    assert proposed(node, stored(2, sender=SECOND)) == [], "the new one may lack entries"
    (view,) = proposed(node, stored(2, sender=NEW))
    assert view.sequencers == (first, *others, NEW)
    node.handle([persisted(3), stored(3)], T0)
    assert node.committed == 2, "two of four are no majority"
    assert node.sequencers == (first, *others, NEW)
    (view,) = proposed(node, stored(3, sender=NEW))
    assert node.committed == 3
    assert view.sequencers == (*others, NEW), "the next change follows the commit of this one"


def test_a_primary_that_leaves_does_not_count_itself() -> None:
    node = changing(*VIEW.sequencers[1:], NEW)
    node.handle([stored(2, sender=NEW)], T0)
    node.handle([persisted(3), stored(3), stored(3, sender=NEW)], T0)
    node.handle([persisted(4), stored(4)], T0)
    assert (node.committed, node.is_outside) == (3, False), "one of three"
    node.handle([stored(4, sender=NEW)], T0)
    assert (node.committed, node.is_outside) == (4, True)


def test_a_sequencer_is_not_removed_if_those_that_stay_lack_entries() -> None:
    first, _, third = VIEW.sequencers
    node = changing(first, third)
    (view,) = proposed(node, stored(2, sender=SECOND))
    assert view.sequencers == (first, third)


def test_of_two_sequencers_none_leaves() -> None:
    first, second, _ = VIEW.sequencers
    node = primary()
    (view,) = proposed(node, wanted(sequencers=(first,)))
    assert len(view.sequencers) == 2
    node.handle([persisted(2), stored(2), stored(2, sender=SECOND)], T0)
    assert (node.committed, node.length) == (2, 2), f"{second} stays"


def test_a_rebalancing_where_no_shard_can_move_is_complete_at_once() -> None:
    """A command waits for it; the only storage node sends no heartbeats."""
    node, _ = elected(view_of(sequencers=3))
    node.handle([persisted(1), stored(1)], T0)
    members = msgspec.structs.replace(view_of(sequencers=3).members, version=1, rebalance=7)
    (view,) = proposed(node, MembersWanted(members))
    assert view.rebalanced == 7


def test_a_rebalancing_is_complete_when_the_last_other_storage_node_has_left() -> None:
    view = msgspec.structs.replace(view_of(sequencers=3), spares=(B,))
    node, _ = elected(view)
    node.handle([persisted(1), stored(1)], T0)
    members = msgspec.structs.replace(view.members, version=1, storage_nodes=(A,), rebalance=7)
    proposed(node, MembersWanted(members))
    (last,) = proposed(node, persisted(2), stored(2))
    assert (last.storage_nodes, last.rebalanced) == ((A,), 7)


def test_a_rebalancing_that_finds_nothing_to_move_is_noted_in_the_view() -> None:
    node = primary()
    (view,) = proposed(node, wanted(rebalance=1))
    assert view.rebalanced == 0
    (view,) = proposed(node, persisted(2), stored(2))
    assert view.rebalanced == 1
    assert proposed(node, persisted(3), stored(3)) == []
