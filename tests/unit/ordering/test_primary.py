"""Claims about the primary, through the sequencer role that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from indilog.config import Config, NodeConfig
from indilog.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.messages import (
    MetalogAppend,
    MetalogEntries,
    MetalogStored,
    MetalogWanted,
    ShardOpened,
    ShardProgress,
    TailIs,
    TailWanted,
)
from indilog.metalog import NewRecords, entry_encoded
from indilog.roles import (
    Effect,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.view import View, view_of
from ordering.sequencer import Sequencer

MessageT = TypeVar("MessageT")

PRIMARY, FIRST, SECOND = (NodeId(f"sequencer-{i}") for i in range(3))
STORAGE, ENGINE = NodeId("storage-0"), NodeId("engine-0")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)


def started(
    view: View | None = None, *, recovered: Sequence[NewRecords] = (), in_flight_max: int = 512
) -> Sequencer:
    config = Config(node=NodeConfig(resend_s=1.0, metalog_entries_in_flight_max=in_flight_max))
    node = Sequencer(PRIMARY, [view or view_of()], config)
    for entry in recovered:
        node.recover(FrameKind.METALOG, entry_encoded(entry), NOWHERE)
    return node


def start(node: Sequencer) -> list[Effect]:
    return node.handle([Started(Epoch(5))], T0)


def progress(stored: int, *, shard: int = 0, sender: NodeId = STORAGE) -> Received:
    return Received(sender, ShardProgress({ShardId(shard): (Epoch(1), stored)}))


def persisted(token: int) -> Persisted:
    return Persisted(token, NOWHERE)


def entry(position: int, counts: dict[int, int], *, writer: int = 1) -> NewRecords:
    by_shard = {ShardId(shard): count for shard, count in counts.items()}
    return NewRecords(
        position, ViewNumber(1), Epoch(5), by_shard, dict.fromkeys(by_shard, Epoch(writer))
    )


def sent(effects: Sequence[Effect], kind: type[MessageT]) -> list[tuple[NodeId, MessageT]]:
    return [
        (e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)
    ]


def reasons(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


# --- proposing


def test_growth_is_persisted_before_it_is_published() -> None:
    node = started()
    start(node)
    effects = node.handle([progress(3)], T0)
    assert effects == [Persist(FrameKind.METALOG, entry_encoded(entry(0, {0: 3})), 0)]
    effects = node.handle([persisted(0)], T0)
    assert sent(effects, MetalogEntries) == [
        (STORAGE, MetalogEntries((entry(0, {0: 3}),))),
        (ENGINE, MetalogEntries((entry(0, {0: 3}),))),
    ]


def test_all_reports_of_one_call_go_into_one_entry() -> None:
    node = started(view_of(engines=3))
    start(node)
    effects = node.handle(
        [progress(3, shard=2), progress(1), progress(4), progress(7, shard=2)], T0
    )
    assert effects == [Persist(FrameKind.METALOG, entry_encoded(entry(0, {0: 4, 2: 7})), 0)]


def test_a_report_that_orders_nothing_new_makes_no_entry() -> None:
    node = started()
    start(node)
    node.handle([progress(3)], T0)
    assert node.handle([progress(3)], T0) == []
    assert node.handle([progress(2)], T0) == []
    assert node.deadline() is None


def test_an_entry_says_only_what_it_adds() -> None:
    node = started()
    start(node)
    node.handle([progress(3)], T0)
    effects = node.handle([progress(8)], T0)
    assert effects == [Persist(FrameKind.METALOG, entry_encoded(entry(1, {0: 5})), 1)]


def test_what_is_ordered_stays_ordered_under_a_new_writer() -> None:
    node = started()
    start(node)
    node.handle([progress(5)], T0)
    newer = Received(STORAGE, ShardProgress({ShardId(0): (Epoch(2), 5)}))
    assert node.handle([newer], T0) == []
    newer = Received(STORAGE, ShardProgress({ShardId(0): (Epoch(2), 6)}))
    effects = node.handle([newer], T0)
    assert effects == [Persist(FrameKind.METALOG, entry_encoded(entry(1, {0: 1}, writer=2)), 1)]


def test_no_more_entries_are_in_flight_than_configured_and_none_is_lost() -> None:
    node = started(in_flight_max=2)
    start(node)
    for stored in (1, 2):
        assert len(node.handle([progress(stored)], T0)) == 1
    assert node.handle([progress(3)], T0) == []
    assert node.handle([progress(4)], T0) == []
    effects = node.handle([persisted(0)], T0)
    assert effects[-1] == Persist(FrameKind.METALOG, entry_encoded(entry(2, {0: 2})), 2)


def test_ordering_that_was_held_up_catches_up_in_one_entry() -> None:
    """Scalog 4.4.3: "the repair interleaves all delayed records that are already replicated in one
    single cut".
    """
    node = started(in_flight_max=1)
    start(node)
    node.handle([progress(1)], T0)
    for stored in range(2, 50):
        node.handle([progress(stored)], T0)
    effects = node.handle([persisted(0)], T0)
    assert effects[-1] == Persist(FrameKind.METALOG, entry_encoded(entry(1, {0: 48})), 1)


# --- committing


def three() -> Sequencer:
    """A primary whose two backups have said that they have nothing."""
    node = started(view_of(sequencers=3))
    start(node)
    node.handle([Received(FIRST, MetalogStored(0)), Received(SECOND, MetalogStored(0))], T0)
    return node


def test_backups_get_an_entry_only_when_it_is_durable_here() -> None:
    node = three()
    assert sent(node.handle([progress(1)], T0), MetalogAppend) == []
    effects = node.handle([persisted(0)], T0)
    append = MetalogAppend(0, (entry(0, {0: 1}),), 0)
    assert sent(effects, MetalogAppend) == [(FIRST, append), (SECOND, append)]


def test_an_entry_is_published_when_a_majority_has_it() -> None:
    node = three()
    node.handle([progress(1)], T0)
    assert sent(node.handle([persisted(0)], T0), MetalogEntries) == []
    effects = node.handle([Received(SECOND, MetalogStored(1))], T0)
    assert {to for to, _ in sent(effects, MetalogEntries)} == {ENGINE, STORAGE}
    assert sent(node.handle([Received(FIRST, MetalogStored(1))], T0), MetalogEntries) == []
    assert node.committed == 1


def test_two_sequencers_are_a_majority_only_together() -> None:
    node = started(view_of(sequencers=2))
    start(node)
    node.handle([Received(FIRST, MetalogStored(0)), progress(1)], T0)
    node.handle([persisted(0)], T0)
    assert node.committed == 0
    node.handle([Received(FIRST, MetalogStored(1))], T0)
    assert node.committed == 1


def test_entries_are_pipelined_to_backups() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0), progress(2)], T0)
    effects = node.handle([persisted(1)], T0)
    append = MetalogAppend(1, (entry(1, {0: 1}),), 0)
    assert sent(effects, MetalogAppend) == [(FIRST, append), (SECOND, append)]


def test_several_entries_that_are_committed_at_once_are_published_in_order() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0), progress(2)], T0)
    node.handle([persisted(1)], T0)
    effects = node.handle([Received(FIRST, MetalogStored(2))], T0)
    entries = (entry(0, {0: 1}), entry(1, {0: 1}))
    assert sent(effects, MetalogEntries)[0] == (STORAGE, MetalogEntries(entries))


def test_a_silent_backup_is_sent_everything_again_after_a_while() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0), Received(SECOND, MetalogStored(0))], T0)
    assert node.deadline() == T0 + 1.0
    assert node.handle([], Instant(T0 + 0.9)) == []
    effects = node.handle([], Instant(T0 + 1.0))
    append = MetalogAppend(0, (entry(0, {0: 1}),), 0)
    assert sent(effects, MetalogAppend) == [(FIRST, append), (SECOND, append)]
    assert node.deadline() == T0 + 2.0


def test_a_backup_that_has_everything_is_left_alone() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0)], T0)
    node.handle([Received(FIRST, MetalogStored(1)), Received(SECOND, MetalogStored(1))], T0)
    assert node.deadline() is None


def test_an_answer_that_shows_a_gap_is_followed_by_what_is_missing() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0), progress(2)], T0)
    node.handle([persisted(1)], T0)
    effects = node.handle([Received(FIRST, MetalogStored(0))], T0)
    both = (entry(0, {0: 1}), entry(1, {0: 1}))
    assert sent(effects, MetalogAppend) == [(FIRST, MetalogAppend(0, both, 0))]


def test_a_backup_far_behind_is_sent_one_page_an_answer() -> None:
    entries = [entry(position, {0: 1}) for position in range(5)]
    node = started(view_of(sequencers=3), recovered=entries, in_flight_max=2)
    start(node)
    effects = node.handle([Received(FIRST, MetalogStored(0))], T0)
    assert sent(effects, MetalogAppend) == [(FIRST, MetalogAppend(0, tuple(entries[:2]), 0))]
    effects = node.handle([Received(FIRST, MetalogStored(2))], T0)
    assert sent(effects, MetalogAppend) == [(FIRST, MetalogAppend(2, tuple(entries[2:4]), 2))]


# --- restarting


def test_a_restarted_primary_asks_its_backups_what_they_have() -> None:
    entries = [entry(position, {0: 1}) for position in range(2)]
    node = started(view_of(sequencers=3), recovered=entries)
    effects = start(node)
    probe = MetalogAppend(2, (), 0)
    assert effects == [Send(FIRST, probe), Send(SECOND, probe)]
    assert node.handle([], Instant(T0 + 1.0)) == [Send(FIRST, probe), Send(SECOND, probe)]


def test_a_restarted_primary_commits_what_it_recovered_with_a_majority() -> None:
    entries = [entry(position, {0: 1}) for position in range(2)]
    node = started(view_of(sequencers=3), recovered=entries)
    start(node)
    effects = node.handle([Received(FIRST, MetalogStored(1))], T0)
    assert sent(effects, MetalogEntries)[0] == (STORAGE, MetalogEntries((entries[0],)))
    assert sent(effects, MetalogAppend) == [(FIRST, MetalogAppend(1, (entries[1],), 1))]


def test_a_lone_primary_commits_what_it_recovered_at_once() -> None:
    entries = [entry(position, {0: 2}) for position in range(3)]
    node = started(recovered=entries, in_flight_max=2)
    effects = start(node)
    assert (node.committed, node.tail) == (3, 6)
    assert sent(effects, MetalogEntries)[0] == (STORAGE, MetalogEntries(tuple(entries[1:])))


def test_a_restarted_primary_goes_on_where_its_entries_end() -> None:
    node = started(recovered=[entry(0, {0: 2})])
    start(node)
    assert node.handle([progress(2)], T0) == []
    effects = node.handle([progress(3)], T0)
    assert effects == [Persist(FrameKind.METALOG, entry_encoded(entry(1, {0: 1})), 1)]


# --- answering


def test_a_reader_that_missed_entries_is_sent_the_committed_ones_page_by_page() -> None:
    entries = [entry(position, {0: 1}) for position in range(3)]
    node = started(recovered=entries, in_flight_max=2)
    start(node)
    wanted = [Received(STORAGE, MetalogWanted(position)) for position in (0, 2, 3, 9)]
    assert node.handle(wanted, T0) == [
        Send(STORAGE, MetalogEntries(tuple(entries[:2]))),
        Send(STORAGE, MetalogEntries((entries[2],))),
        Send(STORAGE, MetalogEntries(())),
        Send(STORAGE, MetalogEntries(())),
    ]


def test_an_entry_that_is_not_committed_is_not_shown() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(0)], T0)
    effects = node.handle([Received(ENGINE, MetalogWanted(0))], T0)
    assert effects == [Send(ENGINE, MetalogEntries(()))]


def test_the_tail_is_that_of_committed_entries() -> None:
    node = three()
    node.handle([progress(4)], T0)
    node.handle([persisted(0)], T0)
    wanted = Received(ENGINE, TailWanted(7))
    assert node.handle([wanted], T0) == [Send(ENGINE, TailIs(7, 0, 0, {}))]
    node.handle([Received(FIRST, MetalogStored(1))], T0)
    assert node.handle([wanted], T0) == [Send(ENGINE, TailIs(7, 1, 4, {ShardId(0): 4}))]


def test_the_cut_in_an_answer_does_not_change_afterwards() -> None:
    node = started()
    start(node)
    effects = node.handle([Received(ENGINE, TailWanted(7))], T0)
    node.handle([progress(4)], T0)
    node.handle([persisted(0)], T0)
    assert sent(effects, TailIs)[0][1].cut == {}


def test_a_restarted_primary_tells_no_tail_that_goes_back_in_time() -> None:
    node = started(view_of(sequencers=3), recovered=[entry(0, {0: 4})])
    start(node)
    wanted = Received(ENGINE, TailWanted(7))
    effects = node.handle([wanted], T0)
    assert reasons(effects) == ["it is not known yet which recovered entries are committed"]
    effects = node.handle([Received(FIRST, MetalogStored(1)), wanted], T0)
    assert sent(effects, TailIs) == []
    assert sent(node.handle([wanted], T0), TailIs)[0][1].tail == 4


# --- what has no place here


@pytest.mark.parametrize(
    "event",
    [
        progress(1, sender=NodeId("storage-9")),
        progress(1, sender=ENGINE),
        progress(1, shard=9),
        progress(-1),
        Received(NodeId("sequencer-9"), MetalogStored(0)),
        Received(PRIMARY, MetalogStored(0)),
        Received(FIRST, MetalogStored(1)),
        Received(FIRST, MetalogStored(-1)),
        Received(NodeId("index-0-0"), MetalogWanted(0)),
        Received(STORAGE, MetalogWanted(-1)),
        Received(NodeId("nobody"), TailWanted(1)),
        Received(FIRST, MetalogAppend(0, (), 0)),
        Received(STORAGE, ShardOpened(ShardId(0), Epoch(1), 0)),
    ],
)
def test_what_has_no_place_here_is_ignored_and_changes_nothing(event: Received) -> None:
    node = three()
    effects = node.handle([event], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    node.check_invariants()
    assert (node.length, node.committed) == (0, 0)


def test_one_shard_out_of_place_does_not_spoil_the_others() -> None:
    node = started()
    start(node)
    report = ShardProgress({ShardId(9): (Epoch(1), 2), ShardId(0): (Epoch(1), 2)})
    effects = node.handle([Received(STORAGE, report)], T0)
    assert [type(effect) for effect in effects] == [Ignore, Persist]
