"""How a replica recovers from damage that it finds at its start (A5, decision 0009)."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, NodeId, ShardId, ViewNumber
from indilog.kernel.metalog import NewRecords, Span
from indilog.roles.role import FrameKind, Location, Lost, Started
from indilog.wire.messages import (
    AppendBatch,
    MetalogEntries,
    ShardClaim,
    ShardClaimed,
    ShardOpen,
    ShardOpened,
    ShardProgress,
    ShardStored,
)
from indilog_storage.batch_reads import DamagedBatch
from indilog_storage.shard import NEVER, Shard
from indilog_storage.shard_parts import ShardState
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Frame,
    Machine,
    batch,
    config_of,
    entries,
    messages,
)
from tests.unit.storage.replicas import (
    E1,
    E2,
    VIEW,
    A,
    B,
    Pair,
    all_of,
    expected,
    replicated,
    shard_of,
)


def restarted_without(machine: Machine, index: int, *, kind: bool, payload: bool) -> Machine:
    """Return the next life; of the frame at `index` so much is left."""
    after = Machine(VIEW, machine.config, machine.name)
    for number, (frame_kind, data, location) in enumerate(machine.frames):
        if number == index:
            after.node.lost(Lost(frame_kind if kind else None, data if payload else b"", location))
        else:
            after.node.recover(frame_kind, data, location)
        after.frames.append((frame_kind, data, location))
    after.node.recovered()
    return after


@pytest.mark.parametrize(("kind", "payload"), [(True, True), (True, False), (False, False)])
def test_a_replica_recovers_around_any_lost_frame(*, kind: bool, payload: bool) -> None:
    """A5: all other frames are recovered, and the lost records are repaired."""
    pair = replicated()
    before = pair.nodes[A]
    for index in range(len(before.frames)):
        machine = restarted_without(before, index, kind=kind, payload=payload)
        pair.nodes[A] = machine
        machine.node.check_invariants()
        pair.tell(A, entries({SHARD: 6}), sender=PRIMARY)
        assert all_of(machine, 6) == expected(6), f"frame {index}"


@pytest.mark.parametrize("payload", [True, False])
def test_a_repaired_batch_is_lost_again_where_the_first_one_left_no_trace(*, payload: bool) -> None:
    """The first one was at the end of a segment, and cut as a torn tail."""
    pair = replicated(4)
    before = pair.nodes[A]
    batches = [f for f in before.frames if f[0] is FrameKind.RECORDS]
    cut = before.frames.index(batches[0])
    _, data, location = before.frames[cut]
    before.frames[cut] = (FrameKind.REPAIRED, data, location)
    machine = pair.nodes[A] = restarted_without(before, cut, kind=True, payload=payload)
    machine.node.check_invariants()
    pair.tell(A, entries({SHARD: 4}), sender=PRIMARY)
    assert all_of(machine, 4) == expected(4)


def test_a_lost_opening_is_inferred_from_the_batches_after_it() -> None:
    """Records that the opening dropped must not count as records of the next writer."""
    pair = replicated(2)
    pair.tell(A, AppendBatch(batch(2, [b"stale", b"stale"])))
    pair.tell_both(ShardClaim(SHARD, E2))
    pair.tell_both(ShardOpen(SHARD, E2, 2))
    lost = [len(pair.nodes[A].frames) - 1]
    pair.tell_both(AppendBatch(batch(2, [b"2", b"3"], epoch=2)))
    lost.append(len(pair.nodes[A].frames) - 1)
    pair.tell_both(AppendBatch(batch(4, [b"4"], epoch=2)))
    before = pair.nodes[A]
    for index in lost:
        machine = pair.nodes[A] = restarted_without(before, index, kind=False, payload=False)
        assert machine.node.records == 5
        pair.tell_both(entries({SHARD: 2}, {SHARD: 3}), sender=PRIMARY)
        pair.settle()
        assert all_of(machine, 5) == expected(5)


def written_by(writer: Epoch, *cuts: int, start: int = 0) -> MetalogEntries:
    """Return the entries from position `start` on that order so many records of one writer."""
    return entries_message(
        tuple(
            NewRecords(start + index, ViewNumber(1), E1, {SHARD: count}, {SHARD: writer})
            for index, count in enumerate(cuts)
        )
    )


def test_an_entry_of_a_writer_that_never_opened_here_proves_a_lost_opening() -> None:
    """The conclusion is kept over further restarts."""
    pair = replicated(2, ordering_frame_entries=64)
    pair.tell(A, AppendBatch(batch(2, [b"stale", b"stale"])))
    machine = pair.nodes[A] = restarted_without(pair.nodes[A], 0, kind=False, payload=False)
    pair.tell(B, ShardClaim(SHARD, E2))
    pair.tell(B, ShardOpen(SHARD, E2, 2))
    pair.tell(B, AppendBatch(batch(2, [b"2", b"3"], epoch=2)))
    pair.tell_both(written_by(E1, 2), written_by(E2, 2, start=1), sender=PRIMARY)
    pair.settle()
    assert all_of(machine, 4) == expected(4)
    pair.tell(A, ShardClaim(SHARD, E2))
    assert pair.tell(A, ShardOpen(SHARD, E2, 4))
    pair.restart(A)
    pair.tell_both(written_by(E1, 2), written_by(E2, 2, start=1), sender=PRIMARY)
    pair.settle()
    assert all_of(pair.nodes[A], 4) == expected(4)


def test_records_dropped_by_an_opening_lost_in_a_torn_tail_stay_dropped() -> None:
    pair = replicated(2, ordering_frame_entries=64)
    pair.tell(A, AppendBatch(batch(2, [b"stale", b"stale"])))
    kept = len(pair.nodes[A].frames)
    pair.tell_both(ShardClaim(SHARD, E2))
    pair.tell_both(ShardOpen(SHARD, E2, 2))
    pair.tell_both(AppendBatch(batch(2, [b"2", b"3"], epoch=2)))
    del pair.nodes[A].frames[kept:]
    pair.restart(A)
    pair.tell_both(written_by(E1, 2), written_by(E2, 2, start=1), sender=PRIMARY)
    pair.settle()
    assert all_of(pair.nodes[A], 4) == expected(4)
    pair.tell(A, ShardClaim(SHARD, E2))
    assert pair.tell(A, ShardOpen(SHARD, E2, 4))
    pair.restart(A)
    pair.tell_both(written_by(E1, 2), written_by(E2, 2, start=1), sender=PRIMARY)
    assert all_of(pair.nodes[A], 4) == expected(4)


def ordered_and_reopened(journal: list[tuple[NodeId, Frame]] | None = None) -> Pair:
    """Two replicas with ordered records of one writer, opened for the next one where these end."""
    pair = Pair(config_of(ordering_frame_entries=64))
    if journal is not None:
        for name, machine in pair.nodes.items():
            machine.frames = Noted(name, journal)
    pair.tell_both(ShardClaim(SHARD, E1))
    pair.tell_both(ShardOpen(SHARD, E1, 0))
    pair.tell_both(AppendBatch(batch(0, [b"0", b"1"])))
    pair.tell_both(AppendBatch(batch(2, [b"2", b"3"])))
    pair.tell_both(written_by(E1, 2, 2), sender=PRIMARY)
    pair.tell_both(ShardClaim(SHARD, E2))
    pair.tell_both(ShardOpen(SHARD, E2, 4))
    return pair


class Noted(list[Frame]):
    """The frames of one of the replicas that share `journal`."""

    def __init__(self, name: NodeId, journal: list[tuple[NodeId, Frame]]) -> None:
        super().__init__()
        self._name = name
        self._journal = journal

    def append(self, frame: Frame) -> None:
        super().append(frame)
        self._journal.append((self._name, frame))


def test_one_lost_header_in_a_shared_journal_loses_nothing_of_all_replicas() -> None:
    """A5, embedded: each role is notified of damage that may be another role's."""
    journal: list[tuple[NodeId, Frame]] = []
    before = ordered_and_reopened(journal)
    for damaged in range(len(journal)):
        pair = Pair(before.config)
        for number, (name, (kind, payload, location)) in enumerate(journal):
            if number == damaged:
                for machine in pair.nodes.values():
                    machine.node.lost(Lost(None, b"", location))
            else:
                pair.nodes[name].node.recover(kind, payload, location)
                pair.nodes[name].frames.append((kind, payload, location))
        pair.tell_both(written_by(E1, 2, 2), sender=PRIMARY)
        pair.tell_both(ShardClaim(SHARD, Epoch(3)))
        pair.tell_both(ShardOpen(SHARD, Epoch(3), 4))
        pair.settle()
        for machine in pair.nodes.values():
            assert all_of(machine, 4) == expected(4), f"frame {damaged}"


def test_unknown_damage_before_an_opening_drops_nothing_that_was_ordered() -> None:
    """Replicas that share a journal are all notified: otherwise all would drop the records."""
    before = ordered_and_reopened().nodes[A]
    states = [n for n, (kind, _, _) in enumerate(before.frames) if kind is FrameKind.SHARD_STATE]
    machine = restarted_without(before, states[2], kind=False, payload=False)
    assert machine.node.status()["missing_records"] == 0
    machine.tell(written_by(E1, 2, 2), sender=PRIMARY)
    assert all_of(machine, 4) == expected(4)


def test_records_ordered_after_unknown_damage_are_kept_if_their_writer_opened_here() -> None:
    """The writer opens the shard again before the entries reached the journal."""
    pair = replicated(0, ordering_frame_entries=64)
    for first in (0, 2):
        pair.tell_both(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    before = pair.nodes[A]
    before.frames.append((FrameKind.ORDERING, b"damaged", Location(9, 32, 6)))
    machine = restarted_without(before, len(before.frames) - 1, kind=False, payload=False)
    machine.frames.pop()
    machine.tell(written_by(E1, 2, 2), sender=PRIMARY)
    machine.tell(ShardClaim(SHARD, E2))
    machine.tell(ShardOpen(SHARD, E2, 4))
    assert machine.node.status()["missing_records"] == 0
    assert all_of(machine, 4) == expected(4)


def test_a_shard_with_unknown_damage_is_opened_when_its_ordered_prefix_is_known() -> None:
    """A writer may open before the entries that the ordering journal lacks arrive."""
    pair = replicated(0, ordering_frame_entries=64)
    pair.tell(A, AppendBatch(batch(0, [b"0", b"1"])), AppendBatch(batch(2, [b"2", b"3"])))
    before = pair.nodes[A]
    before.frames.append((FrameKind.ORDERING, b"damaged", Location(9, 32, 6)))
    machine = restarted_without(before, len(before.frames) - 1, kind=False, payload=False)
    machine.turn(Started(Epoch(2)))
    machine.tell(ShardClaim(SHARD, E2))
    opening = ShardOpen(SHARD, E2, 4)
    assert messages(machine.tell(opening), ENGINE) == []
    machine.tell(written_by(E1, 2, 2), sender=PRIMARY)
    machine.nothing_more()
    assert messages(machine.tell(opening), ENGINE) == [ShardOpened(SHARD, E2, 4)]
    assert machine.node.status()["missing_records"] == 0
    assert all_of(machine, 4) == expected(4)


def test_records_dropped_by_a_lost_opening_do_not_count_as_unordered() -> None:
    pair = replicated(2, ordering_frame_entries=64)
    pair.tell(A, AppendBatch(batch(2, [b"stale", b"stale"])))
    pair.tell(A, written_by(E2, 2, start=1), sender=PRIMARY)
    pair.nodes[A].node.check_invariants()


def test_after_unknown_damage_a_replica_is_not_authoritative_until_it_is_opened() -> None:
    known = [False]
    shard = Shard(ShardId(0), leading=True)
    shard.apply(ShardState(shard.id, E1, 0))
    known.append(shard.authoritative)
    shard.doubt()
    known.append(shard.authoritative)
    assert shard.can_open_at(7)
    shard.apply(ShardState(shard.id, E2, 7))
    known.append(shard.authoritative)
    assert known == [False, True, False, True]
    assert dict(shard.holes) == {0: 7}
    assert not shard.can_open_at(9)


def test_a_shard_can_be_opened_inside_a_hole() -> None:
    """Only other replicas know where the hole's batches begin. If the opening were refused, the
    shard would stay closed.
    """
    shard = shard_of((0, 2), (2, 6), (6, 9))
    assert shard.lose(DamagedBatch(Location(1, 232, 10), readable=True))
    assert not shard.can_open_at(1), "a batch would be split"
    assert not shard.can_open_at(7)
    assert shard.can_open_at(4)
    shard.apply(ShardState(shard.id, E2, 4))
    assert (dict(shard.holes), shard.stored) == ({2: 4}, 4)
    shard.check_invariants()


def test_a_shard_opens_inside_records_of_unknown_state() -> None:
    """The opening drops those records, so it splits none of their batches."""
    shard = shard_of((0, 2))
    shard.order(Span(shard.id, 0, 0, 2, E1))
    shard.store(2, 6, Location(1, 232, 10))
    shard.doubt()
    assert not shard.can_open_at(1), "it is ordered"
    assert shard.can_open_at(4)
    shard.apply(ShardState(shard.id, E2, 4))
    assert (dict(shard.holes), shard.stored) == ({2: 4}, 4)
    shard.check_invariants()


def test_a_replica_that_takes_a_lost_batch_for_a_hole_opens_where_the_others_end() -> None:
    """Otherwise its prefix ends later than theirs, at a hole, and the writer asks without end."""
    pair = replicated(2)
    pair.tell(B, AppendBatch(batch(2, [b"2"])))
    pair.tell(A, AppendBatch(batch(2, [b"2"])), AppendBatch(batch(3, [b"3", b"4"])))
    pair.tell(A, AppendBatch(batch(5, [b"5"])))
    lost = [n for n, f in enumerate(pair.nodes[A].frames) if f[0] is FrameKind.RECORDS][1:3]
    frames = [f for n, f in enumerate(pair.nodes[A].frames) if n not in lost]
    pair.nodes[A] = Machine(VIEW, pair.config, A, frames)
    assert pair.nodes[A].node.status()["missing_records"] == 3
    claimed = messages(pair.tell(A, ShardClaim(SHARD, E2)))
    assert claimed == [ShardClaimed(SHARD, E2, 6, authoritative=True)]
    assert ShardOpened(SHARD, E2, 3) in messages(pair.tell(A, ShardOpen(SHARD, E2, 3)))


def with_a_hole_in_what_is_not_ordered(*, writer_lives: bool = True) -> Machine:
    """Batches of two records up to 8, of which 2 are ordered; the one at 4 is damaged."""
    machine = Machine(VIEW, config_of(), A)
    machine.tell(ShardClaim(SHARD, E1), ShardOpen(SHARD, E1, 0))
    machine.tell(ShardOpen(SHARD, E1, 0))
    for first in range(0, 8, 2):
        machine.tell(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    machine.tell(entries({SHARD: 2}), sender=PRIMARY)
    if not writer_lives:
        machine.tell(ShardClaim(SHARD, E2))
        machine.tell(ShardOpen(SHARD, E2, 8))
    batches = [i for i, frame in enumerate(machine.frames) if frame[0] is FrameKind.RECORDS]
    return restarted_without(machine, batches[2], kind=True, payload=True)


def said(machine: Machine) -> list[ShardProgress | ShardStored]:
    sent = messages(machine.turn(Started(Epoch(2))))
    return [message for message in sent if isinstance(message, ShardProgress | ShardStored)]


def test_records_lost_before_they_were_ordered_are_not_reported_and_are_resent() -> None:
    """Otherwise the record is acknowledged with one copy fewer than the ack quorum."""
    machine = with_a_hole_in_what_is_not_ordered()
    assert sorted(said(machine), key=str) == [
        ShardProgress({SHARD: (E1, 4)}), ShardStored(SHARD, E1, 4),
    ]  # fmt: skip
    machine.tell(AppendBatch(batch(2)), AppendBatch(batch(4, [b"4"])))
    assert machine.node._shards[SHARD].sound == 5, "part of it"
    sent = machine.tell(AppendBatch(batch(5, [b"5"])))
    assert ShardProgress({SHARD: (E1, 8)}) in messages(sent)
    machine.tell(entries({SHARD: 6}, start=1), sender=PRIMARY)
    assert all_of(machine, 8) == expected(8)
    again = machine.restarted()
    assert all_of(again, 8) == expected(8), "what filled the hole was written as such"


def test_damaged_records_of_an_earlier_writer_count_as_stored() -> None:
    """No writer would resend them, and their callers got an unknown outcome."""
    machine = with_a_hole_in_what_is_not_ordered(writer_lives=False)
    assert ShardProgress({SHARD: (E2, 8)}) in said(machine)


def without_its_opening() -> Machine:
    """Of writer 2, who opened at 2 or 4, the opening and the batch at 2 are lost; 4 to 6 is not."""
    machine = Machine(VIEW, config_of(), A)
    machine.tell(ShardClaim(SHARD, E1), ShardOpen(SHARD, E1, 0))
    machine.tell(ShardOpen(SHARD, E1, 0))
    machine.tell(AppendBatch(batch(0, [b"0", b"1"])))
    machine.tell(entries({SHARD: 2}), sender=PRIMARY)
    machine.tell(ShardClaim(SHARD, E2))
    kept = len(machine.frames)
    machine.tell(ShardOpen(SHARD, E2, 2))
    machine.tell(AppendBatch(batch(2, [b"2", b"3"], epoch=2)))
    machine.tell(AppendBatch(batch(4, [b"4", b"5"], epoch=2)))
    del machine.frames[kept + 1]
    machine.frames[kept] = (FrameKind.SHARD_STATE, b"", machine.frames[kept][2])
    return restarted_without(machine, kept, kind=False, payload=False)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_replica_asks_its_writer_where_it_opened_and_reports_nothing_before(
    restarts: int,
) -> None:
    """Records missing before an intact batch may be the present writer's, and not ordered yet."""
    machine = without_its_opening()
    for _ in range(restarts):
        machine.take_checkpoint()
        machine = machine.restarted()
    reported = said(machine)
    assert reported == [ShardStored(SHARD, NEVER, 2)], "so the writer claims and opens it again"
    again = messages(machine.tell(ShardClaim(SHARD, E2)), ENGINE)
    assert again == [ShardClaimed(SHARD, E2, 6, authoritative=True)]
    sent = messages(machine.tell(ShardOpen(SHARD, E2, 2)))
    assert sent == [ShardOpened(SHARD, E2, 2), ShardProgress({SHARD: (E2, 2)})]
    sent = messages(machine.tell(AppendBatch(batch(2, [b"2", b"3"], epoch=2))))
    assert ShardProgress({SHARD: (E2, 6)}) in sent
    machine.tell(entries({SHARD: 4}, start=1), sender=PRIMARY)
    assert all_of(machine, 6) == expected(6)


def test_records_before_the_writers_opening_count_as_stored_once_the_opening_is_known() -> None:
    machine = without_its_opening()
    machine.tell(ShardClaim(SHARD, E2))
    sent = messages(machine.tell(ShardOpen(SHARD, E2, 4)))
    assert ShardProgress({SHARD: (E2, 6)}) in sent


def test_a_newer_writer_opens_a_shard_of_which_an_opening_was_lost() -> None:
    machine = without_its_opening()
    machine.tell(ShardClaim(SHARD, Epoch(3)))
    sent = messages(machine.tell(ShardOpen(SHARD, Epoch(3), 6)))
    assert ShardProgress({SHARD: (Epoch(3), 6)}) in sent
    machine.tell(AppendBatch(batch(6, [b"6"], epoch=2)))
    assert machine.node.records == 6, "the older one is refused"


def test_no_prefix_beyond_a_hole_at_the_end_of_the_ordered_records_is_reported() -> None:
    shard = shard_of((0, 4), (4, 6), (6, 8))
    assert shard.lose(DamagedBatch(Location(1, 32, 10), readable=True))
    assert shard.sound == 0
    shard.order(Span(shard.id, 0, 0, 2))
    assert shard.sound == 2
    shard.order(Span(shard.id, 2, 2, 2))
    assert shard.sound == 8, "the rest is fetched from other replicas"
    assert not shard.misses(0, 4)
