"""Claims about a storage node that gets from others what the primary keeps no more (0030)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, ViewNumber
from indilog.kernel.metalog import Base, Entry, Floor, NewRecords, Trim
from indilog.wire.base_messages import History, HistoryWanted, MetalogBase, MetalogCovered
from indilog.wire.messages import AppendBatch, IndexDataWanted, MetalogWanted
from indilog.wire.tag_messages import TagFloorsWanted
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    INDEX,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    machine_of,
    messages,
)
from tests.unit.storage.replicas import A, B, Pair, all_of, expected, replicated

PLACES = 4
"""Entries of `ordered_pair`."""


def cut(position: int, count: int = 2) -> NewRecords:
    counts = {SHARD: count}
    return NewRecords(position, ViewNumber(1), Epoch(1), counts, {SHARD: Epoch(1)}, 1000 * position)


def trim(position: int, number: int, until: int) -> Trim:
    return Trim(position, ViewNumber(1), Epoch(1), number, (Floor(9, until, of_log=False),))


ENTRIES: tuple[Entry, ...] = (cut(0), trim(1, 0, 1), cut(2), cut(3))


def ordered_pair() -> Pair:
    """Two replicas of six records, ordered by three entries, and a trim."""
    pair = replicated(0)
    for first in (0, 2, 4):
        pair.tell_both(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    pair.tell_both(entries_message(ENTRIES), sender=PRIMARY)
    return pair


def based(pair: Pair) -> Base:
    """Wipe A and tell it the base when it asks."""
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


def test_it_asks_the_primary_for_what_follows_and_applies_it() -> None:
    pair = ordered_pair()
    based(pair)
    pair.settle()
    asked = pair.nodes[A].asked
    assert asked is not None
    assert (asked.start, asked.last) == (PLACES, 1)
    pair.tell(A, entries_message((cut(4, 1),)), sender=PRIMARY)
    assert pair.nodes[A].node.position == PLACES + 1


def test_what_it_got_is_in_the_next_checkpoint_and_a_crash_before_begins_anew() -> None:
    pair = ordered_pair()
    based(pair)
    pair.settle()
    pair.tell(A, entries_message((cut(4, 1),)), sender=PRIMARY)
    assert pair.nodes[A].node.unsaved == PLACES
    before = pair.nodes[A].restarted()
    assert before.node.position == 0
    pair.nodes[A].take_checkpoint()
    assert pair.nodes[A].node.unsaved == 0
    after = pair.nodes[A].restarted()
    assert after.node.position == PLACES + 1
    assert all_of(after, 4) == expected(4)


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


def test_who_has_other_entries_is_answered_from_the_first_one() -> None:
    pair = ordered_pair()
    asked = HistoryWanted(1, 2, Epoch(7), PLACES, Epoch(1))
    (history,) = messages(pair.nodes[B].tell(asked, sender=A))
    assert isinstance(history, History)
    assert (history.start, history.previous, len(history.entries)) == (0, 0, PLACES)


def test_when_nobody_has_the_order_the_node_says_so() -> None:
    machine = Machine()
    assert machine.asked is not None
    with pytest.raises(DataLossError, match="restore the data directory of a storage node"):
        machine.tell(
            MetalogBase(Base().with_entries(ENTRIES), machine.asked.request), sender=PRIMARY
        )


@pytest.mark.parametrize("entries", [(cut(0), cut(1)), ENTRIES], ids=["no trims", "trims"])
def test_when_all_others_lack_the_order_too_the_node_says_so(entries: tuple[Entry, ...]) -> None:
    pair = ordered_pair()
    pair.wipe(B)
    told = pair.nodes[B].asked
    assert told is not None
    base = Base().with_entries(entries)
    pair.nodes[B].tell(MetalogBase(base, told.request), sender=PRIMARY)
    pair.wipe(A)
    asked = pair.nodes[A].asked
    assert asked is not None
    with pytest.raises(DataLossError, match="no other storage node has it"):
        pair.tell(A, MetalogBase(base, asked.request), sender=PRIMARY)


def test_a_source_that_only_lags_is_asked_again() -> None:
    pair = ordered_pair()
    pair.wipe(B)  # it has not heard of the base yet, so it cannot say that it is below
    based(pair)
    told = pair.nodes[B].asked
    assert told is not None
    assert pair.nodes[A].node.position == 0
    pair.tell(B, entries_message(ENTRIES), sender=PRIMARY)
    pair.settle()
    assert pair.nodes[A].node.position == PLACES


def test_a_base_that_nobody_asked_for_or_that_is_nonsense_is_ignored() -> None:
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
        "a base that nobody asked for, or no longer",
        "a base of somebody who is not the primary",
        "a base that no entries add up to",
    ]
    assert node.node.position == 0


def test_floors_that_were_not_asked_for_are_ignored() -> None:
    pair = ordered_pair()
    floors = messages(pair.nodes[B].tell(TagFloorsWanted(), sender=INDEX), INDEX)
    pair.nodes[A].tell(*floors, sender=B)
    assert pair.nodes[A].ignored[-1] == "floors that nobody asked for, or no longer"


def test_a_node_below_its_base_gives_no_index_data() -> None:
    pair = ordered_pair()
    pair.wipe(A)
    (data,) = messages(pair.nodes[A].tell(IndexDataWanted(0, PLACES, 1), sender=INDEX), INDEX)
    assert data.blocks == ()  # type: ignore[union-attr]


def test_the_primary_hears_what_the_older_of_two_checkpoints_covers() -> None:
    machine = machine_of()
    machine.tell(entries_message(ENTRIES[:1]), sender=PRIMARY)
    assert covered(checkpointed(machine)) == []
    machine.tell(entries_message(ENTRIES[1:]), sender=PRIMARY)
    assert covered(checkpointed(machine)) == [MetalogCovered(1, Epoch(1))]
    assert covered(checkpointed(machine)) == [MetalogCovered(PLACES, Epoch(1))]


def test_a_restart_says_what_the_checkpoint_before_its_own_covers() -> None:
    machine = machine_of()
    machine.tell(entries_message(ENTRIES[:2]), sender=PRIMARY)
    checkpointed(machine)
    machine.tell(entries_message(ENTRIES[2:]), sender=PRIMARY)
    checkpointed(machine)
    machine.take_checkpoint()
    after = machine.restarted()
    # The one that it starts from was taken behind the second one.
    assert covered(messages(after.started)) == [MetalogCovered(PLACES, Epoch(1))]
    assert any(isinstance(m, MetalogWanted) for m in messages(after.started))


def checkpointed(machine: Machine) -> list[object]:
    """Let a checkpoint be written; return what is said in the next turn."""
    machine.take_checkpoint()
    machine.node.checkpointed()
    return [*messages(machine.turn())]


def covered(said: Sequence[object]) -> list[MetalogCovered]:
    return [message for message in said if isinstance(message, MetalogCovered)]
