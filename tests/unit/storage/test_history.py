"""A storage node fetches from others the history that the primary has freed (decision 0030)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, ViewNumber
from indilog.kernel.metalog import Base, Entry, Floor, NewRecords, NewWriters, Trim, decode_entries
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Send, TermBegun
from indilog.wire.base_messages import History, HistoryWanted, MetalogBase, MetalogCovered
from indilog.wire.messages import (
    AppendBatch,
    IndexDataWanted,
    MetalogEntries,
    MetalogWanted,
    ShardStored,
)
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from indilog_storage import history
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    INDEX,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    machine_of,
    messages,
    new_writers,
    progress,
)
from tests.unit.storage.replicas import A, B, Pair, all_of, expected, replicated

NO_TERM, E1 = Epoch(0), Epoch(1)
PLACES = 5
"""Entries of `ordered_pair`."""


def cut(position: int, count: int = 2) -> NewRecords:
    counts = {SHARD: count}
    return NewRecords(position, ViewNumber(1), Epoch(1), counts, 1000 * position)


def trim(position: int, number: int, until: int) -> Trim:
    return Trim(position, ViewNumber(1), Epoch(1), number, (Floor(9, until, of_log=False),))


ENTRIES: tuple[Entry, ...] = (new_writers(0), cut(1), trim(2, 0, 1), cut(3), cut(4))


def ordered_pair() -> Pair:
    """Two replicas of six records, ordered by three entries, and a trim; they have one writer."""
    pair = replicated(0)
    for first in (0, 2, 4):
        pair.tell_both(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    pair.tell_both(entries_message(ENTRIES[1:]), sender=PRIMARY)
    return pair


def based(pair: Pair) -> Base:
    """Wipe A and answer its question with the base."""
    pair.wipe(A)
    base = Base().with_entries(ENTRIES)
    asked = pair.nodes[A].asked
    assert asked is not None
    pair.tell(A, MetalogBase(base, asked.request), sender=PRIMARY)
    return base


def test_a_wiped_replica_gets_order_floors_and_records_from_the_other_one() -> None:
    pair = ordered_pair()
    based(pair)
    pair.settle()
    wiped, other = pair.nodes[A], pair.nodes[B]
    assert wiped.node.position == PLACES
    assert all_of(wiped, 6) == expected(6) == all_of(other, 6)
    assert wiped.node.status()["trims"] == other.node.status()["trims"] == 1
    assert wiped.node.status()["floors"] == 1
    ours, theirs = wiped.node._ordering, other.node._ordering
    assert [ours.spans_at(p) for p in range(PLACES)] == [theirs.spans_at(p) for p in range(PLACES)]
    assert [ours.ordered_us(s) for s in range(6)] == [theirs.ordered_us(s) for s in range(6)]


def test_entries_after_the_base_are_requested_from_the_primary_and_applied() -> None:
    pair = ordered_pair()
    based(pair)
    pair.settle()
    asked = pair.nodes[A].asked
    assert asked is not None
    assert (asked.start, asked.last) == (PLACES, 1)
    pair.tell(A, entries_message((cut(5, 1),)), sender=PRIMARY)
    assert pair.nodes[A].node.position == PLACES + 1


def test_fetched_history_is_in_the_next_checkpoint_and_an_earlier_crash_restarts_the_fetch() -> (
    None
):
    pair = ordered_pair()
    based(pair)
    pair.settle()
    pair.tell(A, entries_message((cut(5, 1),)), sender=PRIMARY)
    assert pair.nodes[A].node.unsaved == PLACES
    before = pair.nodes[A].restarted()
    assert before.node.position == 0
    pair.nodes[A].take_checkpoint()
    after = pair.nodes[A].restarted()
    assert after.node.position == PLACES + 1
    assert all_of(after, 4) == expected(4)


def partly_adopted(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A wiped node that got two of five entries from the other one."""
    monkeypatch.setattr(history, "_PAGE_ENTRIES", 2)
    pair = ordered_pair()
    pair.wipe(A)
    a, b = pair.nodes[A], pair.nodes[B]
    assert a.asked is not None
    base = Base().with_entries(ENTRIES)
    sent = a.tell(MetalogBase(base, a.asked.request), sender=PRIMARY)
    for _ in ("floors", "history"):
        asked = [send.message for send in sent if send.to == B]
        sent = a.tell(*messages(b.tell(*asked, sender=A), A), sender=B)
    assert a.node.position == 2
    return a


def restarted_with_a_lower_base(machine: Machine) -> None:
    """Deliver the primary's entries that follow those of the other storage node."""
    machine.tell(MetalogEntries(5, Epoch(1), (), 5), sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    assert machine.asked.start == 2
    message = MetalogEntries(2, Epoch(1), ENTRIES[2:], 5, machine.asked.request)
    machine.tell(message, sender=PRIMARY, incarnation=2)
    assert machine.node.position == PLACES


def test_a_node_can_restart_after_the_primary_ended_a_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal has what the primary sent, behind a gap for what the storage node gave."""
    machine = partly_adopted(monkeypatch)
    restarted_with_a_lower_base(machine)
    ordering = [payload for kind, payload, _ in machine.frames if kind is FrameKind.ORDERING]
    assert [len(decode_entries(payload)) for payload in ordering] == [0, 3]
    assert machine.restarted().node.position == 0


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_node_starts_from_the_checkpoint_before_the_one_taken_within_a_fetch(
    monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """The earlier checkpoint lacks the fetched history."""
    machine = partly_adopted(monkeypatch)
    machine.take_checkpoint()
    for _ in range(restarts):
        machine = machine.restarted()
        assert machine.node.position == 2
    restarted_with_a_lower_base(machine)
    machine.checkpoint = None
    assert machine.restarted().node.position == 0


def test_a_fetch_continues_with_another_base_when_an_answer_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = partly_adopted(monkeypatch)
    machine.tell(MetalogEntries(5, Epoch(1), (), 5), sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    lower = MetalogBase(Base().with_entries(ENTRIES[:3]), machine.asked.request)
    asked = machine.tell(lower, sender=PRIMARY, incarnation=2)
    assert any(isinstance(send.message, HistoryWanted) for send in asked if send.to == B)
    asked = [send for _ in range(5) for send in machine.wait(5.0) if send.to == B]
    assert any(isinstance(send.message, HistoryWanted) for send in asked)


def test_a_page_beyond_the_base_is_applied_up_to_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page answers a question from before the primary restarted with a lower base."""
    machine = partly_adopted(monkeypatch)
    machine.tell(MetalogEntries(5, Epoch(1), (), 5), sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    base = Base().with_entries(ENTRIES[:3])
    again = machine.tell(MetalogBase(base, machine.asked.request), sender=PRIMARY, incarnation=2)
    (question,) = [m for m in messages(again, B) if isinstance(m, HistoryWanted)]
    machine.tell(History(question.request, 2, Epoch(1), (trim(2, 0, 1), cut(3))), sender=B)
    assert machine.node.position == 3
    assert machine.node.unsaved == 3


def test_a_base_with_more_trims_than_the_floors_cover_has_them_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = partly_adopted(monkeypatch)
    machine.tell(MetalogEntries(6, Epoch(1), (), 6), sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    base = Base().with_entries((*ENTRIES, trim(5, 1, 2)))
    again = machine.tell(MetalogBase(base, machine.asked.request), sender=PRIMARY, incarnation=2)
    assert [send.message for send in again if send.to == B] == [TagFloorsWanted()]


def test_a_new_primary_that_begins_with_a_base_gets_a_report_of_what_is_stored() -> None:
    """The new primary lacks the reports to the primary before it."""
    machine = machine_of()
    machine.tell(AppendBatch(batch(0, [b"a"])))
    machine.node._ordering.reader.mark_unconfirmed()
    machine.wait(1.0)
    assert machine.asked is not None
    base = MetalogBase(Base().with_entries(ENTRIES), machine.asked.request)
    sent = messages(machine.tell(base, sender=PRIMARY, incarnation=2), PRIMARY)
    assert progress({SHARD: (Epoch(1), 1)}) in sent


def test_entries_that_a_checkpoint_failed_to_save_are_still_unsaved() -> None:
    pair = ordered_pair()
    based(pair)
    pair.settle()
    node = pair.nodes[A].node
    node.checkpoint()
    assert node.unsaved == PLACES, "it was not written"
    node.checkpoint()
    node.checkpointed()
    assert node.unsaved == 0


def test_a_source_that_lacked_the_order_once_is_asked_again() -> None:
    """Each of two sources may lack it for a while; only both at the same time are a loss."""
    view = view_of(storage_nodes=3, replicas=3)
    machine = Machine(view, node=A)
    assert machine.asked is not None
    base = Base().with_entries(ENTRIES)
    sent = machine.tell(MetalogBase(base, machine.asked.request), sender=PRIMARY)

    def answer(sent: list[Send], trims: int, **history: bool) -> list[Send]:
        """Let the source that was asked send floors and the history, or neither."""
        (asked,) = [send for send in sent if isinstance(send.message, TagFloorsWanted)]
        sent = machine.tell(TagFloors(None, trims, ()), sender=asked.to)
        (asked,) = [send for send in sent if isinstance(send.message, HistoryWanted)]
        assert isinstance(asked.message, HistoryWanted)
        page = History(asked.message.request, 0, Epoch(0), (), **history)
        return machine.tell(page, sender=asked.to)

    sent = answer(sent, 0, lacking=True)
    sent = answer(sent, 1, lacking=True)
    assert [type(send.message) for send in sent] == [HistoryWanted]
    with pytest.raises(DataLossError):
        machine.tell(
            History(sent[0].message.request, 0, Epoch(0), (), lacking=True),  # type: ignore[union-attr]
            sender=sent[0].to,
        )


def test_only_a_node_that_has_the_last_entry_of_the_base_answers() -> None:
    pair = ordered_pair()
    node = pair.nodes[B]
    (history,) = messages(node.tell(HistoryWanted(1, 0, Epoch(0), 3, Epoch(1)), sender=A))
    assert isinstance(history, History)
    assert [entry.position for entry in history.entries] == [0, 1, 2]
    for end, epoch in ((3, 2), (PLACES + 1, 1)):
        sent = node.tell(HistoryWanted(2, 0, Epoch(0), end, Epoch(epoch)), sender=A)
        assert messages(sent, A) == []
    assert node.ignored[-1] == "what old entries ordered is not known here yet"


def test_a_node_with_other_entries_is_answered_from_the_first_entry() -> None:
    pair = ordered_pair()
    asked = HistoryWanted(1, 2, Epoch(7), PLACES, Epoch(1))
    (history,) = messages(pair.nodes[B].tell(asked, sender=A))
    assert isinstance(history, History)
    assert (history.start, history.previous, len(history.entries)) == (0, 0, PLACES)


def test_a_loss_of_the_order_at_all_nodes_is_reported() -> None:
    machine = Machine()
    assert machine.asked is not None
    with pytest.raises(DataLossError, match="Restore the data directory of a storage node"):
        machine.tell(
            MetalogBase(Base().with_entries(ENTRIES), machine.asked.request), sender=PRIMARY
        )


@pytest.mark.parametrize("entries", [(cut(0), cut(1)), ENTRIES], ids=["no trims", "trims"])
def test_a_loss_is_reported_when_all_other_nodes_lack_the_order(entries: tuple[Entry, ...]) -> None:
    pair = ordered_pair()
    pair.wipe(B)
    reported = pair.nodes[B].asked
    assert reported is not None
    base = Base().with_entries(entries)
    pair.nodes[B].tell(MetalogBase(base, reported.request), sender=PRIMARY)
    pair.wipe(A)
    asked = pair.nodes[A].asked
    assert asked is not None
    with pytest.raises(DataLossError, match="no other storage node has it"):
        pair.tell(A, MetalogBase(base, asked.request), sender=PRIMARY)


def test_a_source_that_only_lags_is_asked_again() -> None:
    pair = ordered_pair()
    pair.wipe(B)  # B has not received the base yet, so it cannot answer that it is below the base
    based(pair)
    reported = pair.nodes[B].asked
    assert reported is not None
    assert pair.nodes[A].node.position == 0
    pair.tell(B, entries_message(ENTRIES), sender=PRIMARY)
    pair.settle()
    assert pair.nodes[A].node.position == PLACES


def test_a_base_that_was_not_requested_or_is_impossible_is_ignored() -> None:
    pair = ordered_pair()
    pair.wipe(A)
    node = pair.nodes[A]
    asked = node.asked
    assert asked is not None
    base = Base().with_entries(ENTRIES)
    node.tell(MetalogBase(base, asked.request + 1), sender=PRIMARY)
    node.tell(MetalogBase(base, asked.request), sender=B)
    node.tell(MetalogBase(Base(5, Epoch(1), 9), asked.request), sender=PRIMARY)
    assert node.ignored[-3:] == [
        "a base that was not requested, or is no longer wanted",
        "a base of a node that is not the primary",
        "a base that no entries can produce",
    ]
    assert node.node.position == 0


def test_floors_that_were_not_asked_for_are_ignored() -> None:
    pair = ordered_pair()
    floors = messages(pair.nodes[B].tell(TagFloorsWanted(), sender=INDEX), INDEX)
    pair.nodes[A].tell(*floors, sender=B)
    assert pair.nodes[A].ignored[-1] == "floors that were not requested, or are no longer needed"


def test_a_node_below_its_base_gives_no_index_data() -> None:
    pair = ordered_pair()
    pair.wipe(A)
    (data,) = messages(pair.nodes[A].tell(IndexDataWanted(0, PLACES, 1), sender=INDEX), INDEX)
    assert data.blocks == ()  # type: ignore[union-attr]


def test_the_position_of_the_older_of_two_checkpoints_is_reported_to_the_primary() -> None:
    machine = machine_of()
    machine.tell(entries_message(ENTRIES[1:2]), sender=PRIMARY)
    assert covered(checkpointed(machine)) == []
    machine.tell(entries_message(ENTRIES[2:]), sender=PRIMARY)
    assert covered(checkpointed(machine)) == [MetalogCovered(NO_TERM, 2, E1)]
    machine.turn(TermBegun(Epoch(9), PRIMARY))
    covers_all = [MetalogCovered(Epoch(9), PLACES, E1)]
    assert covered(checkpointed(machine)) == covers_all
    assert covered(messages(machine.turn(TermBegun(Epoch(10), PRIMARY)))) == [
        MetalogCovered(Epoch(10), PLACES, E1)
    ], "a primary of a new term knows nothing of it"


def test_a_restart_reports_the_position_of_the_checkpoint_before_its_own() -> None:
    machine = machine_of()
    machine.tell(entries_message(ENTRIES[1:3]), sender=PRIMARY)
    checkpointed(machine)
    machine.tell(entries_message(ENTRIES[3:]), sender=PRIMARY)
    checkpointed(machine)
    machine.take_checkpoint()
    after = machine.restarted()
    # The one that it starts from was taken behind the second one.
    assert covered(messages(after.started)) == [MetalogCovered(NO_TERM, PLACES, E1)]
    assert any(isinstance(m, MetalogWanted) for m in messages(after.started))


def checkpointed(machine: Machine) -> list[object]:
    """Let a checkpoint be written; return the messages of the next iteration."""
    machine.take_checkpoint()
    machine.node.checkpointed()
    return [*messages(machine.turn())]


def covered(said: Sequence[object]) -> list[MetalogCovered]:
    return [message for message in said if isinstance(message, MetalogCovered)]


# --- writers


WRITERS: tuple[Entry, ...] = (new_writers(0), cut(1), new_writers(2, 2), cut(3))


def with_stale_records() -> Pair:
    """A has lost all entries, and has a batch that B dropped when the second writer came."""
    pair = replicated(0)
    pair.tell_both(AppendBatch(batch(0, [b"0", b"1"])))
    pair.tell(A, AppendBatch(batch(2, [b"stale", b"stale"])), AppendBatch(batch(4, [b"stale"])))
    a, b = pair.nodes[A], pair.nodes[B]
    pair.tell(B, entries_message(WRITERS[1:3]), sender=PRIMARY)
    pair.tell(B, AppendBatch(batch(2, [b"2", b"3"], epoch=2)))
    pair.tell(B, entries_message(WRITERS[3:]), sender=PRIMARY)
    b.take_checkpoint()
    pair.restart(B)
    frames = [frame for frame in a.frames if frame[0] is FrameKind.RECORDS]
    pair.start(Machine(a.view, a.config, A, frames))
    return pair


def test_writers_come_with_the_history_and_drop_what_earlier_ones_stored() -> None:
    pair = with_stale_records()
    machine = pair.nodes[A]
    assert machine.node.records == 5
    assert machine.asked is not None
    sent = pair.tell(
        A, MetalogBase(Base().with_entries(WRITERS), machine.asked.request), sender=PRIMARY
    )
    assert machine.node.position == len(WRITERS)
    assert progress({SHARD: (Epoch(2), 4)}) in messages(sent)
    assert ShardStored(SHARD, Epoch(2), 4) in messages(sent, ENGINE)
    pair.settle()
    machine.take_checkpoint()
    pair.restart(A)
    for name in (A, B):
        assert all_of(pair.nodes[name], 4) == expected(4)
        stale = pair.nodes[name].tell(AppendBatch(batch(4, epoch=1)))
        assert messages(stale, ENGINE) == [ShardStored(SHARD, Epoch(2), 4)]


def test_the_history_names_several_writers_of_one_entry_and_each_at_its_place() -> None:
    view = view_of(engines=3)
    machine = machine_of(view)
    machine.open(2, 0, 2)
    machine.tell(entries_message((NewRecords(2, ViewNumber(1), E1, {}),)), sender=PRIMARY)
    machine.open(3, 1)
    machine.take_checkpoint()
    for run in (machine, machine.restarted()):
        end = run.node.position
        (answer,) = messages(run.tell(HistoryWanted(1, 0, Epoch(0), end, E1), sender=A), A)
        assert isinstance(answer, History)
        assert [e.writers for e in answer.entries if isinstance(e, NewWriters)] == [
            {0: 1, 1: 1, 2: 1}, {0: 2, 2: 2}, {1: 3},
        ]  # fmt: skip
        assert [e.position for e in answer.entries] == list(range(end))
