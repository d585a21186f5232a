"""A sequencer's copy of the metalog."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base, NewRecords, NewView, encode_entry
from indilog.kernel.view import View, view_of
from indilog.roles.role import FrameKind
from indilog_ordering.metalog_state import MetalogState, decode_state, encode_state
from indilog_ordering.stored_metalog import StoredMetalog


def entry(position: int, *, epoch: int = 1) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {ShardId(0): position + 1})


def metalog_of(*epochs: int) -> StoredMetalog:
    """A metalog that was recovered, its entries proposed by these incarnations."""
    metalog = StoredMetalog()
    for position, epoch in enumerate(epochs):
        metalog.recover(encode_entry(entry(position, epoch=epoch)))
    return metalog


def test_an_appended_entry_is_stored_only_when_persisted() -> None:
    metalog = StoredMetalog()
    persist = metalog.append(entry(0))
    assert (persist.kind, persist.token) == (FrameKind.METALOG, 0)
    assert (len(metalog), metalog.stored) == (1, 0)
    metalog.on_persisted(persist.token)
    assert metalog.stored == 1


def test_recovered_frames_give_the_same_entries() -> None:
    before, after = StoredMetalog(), StoredMetalog()
    for position in range(3):
        after.recover(before.append(entry(position)).payload)
    assert after.page(0, 9) == before.page(0, 9) == (entry(0), entry(1), entry(2))
    assert after.stored == 3


def test_an_entry_out_of_order_trips_an_assertion() -> None:
    metalog = StoredMetalog()
    with pytest.raises(AssertionError):
        metalog.append(entry(1))
    with pytest.raises(AssertionError):
        metalog.recover(encode_entry(entry(1)))


def test_persisting_out_of_order_trips_an_assertion() -> None:
    metalog = StoredMetalog()
    metalog.append(entry(0))
    metalog.append(entry(1))
    with pytest.raises(AssertionError):
        metalog.on_persisted(1)


def test_a_frame_that_holds_no_entry_is_malformed() -> None:
    with pytest.raises(MalformedFrameError):
        StoredMetalog().recover(b"\x00")


epochs = st.integers(0, 2**32).map(Epoch)
extents = st.builds(Extent, epochs, st.integers(0, 2**63))


@given(st.builds(MetalogState, epochs, st.booleans(), extents))
def test_a_state_that_was_encoded_is_the_same_again(state: MetalogState) -> None:
    assert decode_state(encode_state(state)) == state


OTHER_VERSION, NO_EXTENT = b"\x95\x01\x01\xc2\x92\x00\x00\xc0", b"\x95\x02\x01\xc2\xc0\xc0"


@pytest.mark.parametrize("payload", [b"", b"\x00", OTHER_VERSION, NO_EXTENT])
def test_a_frame_that_holds_no_state_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode_state(payload)


# --- damage


def state(*, promised: int = 3, learner: bool = False, last: int, length: int) -> bytes:
    extent = Extent(Epoch(last), length)
    return encode_state(MetalogState(Epoch(promised), learner, extent))


def test_an_entry_of_the_term_before_the_damage_proves_that_none_is_missing() -> None:
    metalog = metalog_of(1, 1)
    metalog.doubt(FrameKind.METALOG)
    metalog.recover(encode_entry(entry(2)))
    metalog.recovered()
    assert (len(metalog), metalog.learner) == (3, False)


@pytest.mark.parametrize(("position", "epoch"), [(3, 1), (2, 2), (1, 2)])
def test_entries_after_a_hole_are_left_out_and_the_node_is_a_learner(
    position: int, epoch: int
) -> None:
    metalog = metalog_of(1, 1)
    metalog.doubt(FrameKind.METALOG)
    metalog.recover(encode_entry(entry(position, epoch=epoch)))
    metalog.recover(encode_entry(entry(position + 1, epoch=epoch)))
    metalog.recovered()
    assert (len(metalog), metalog.learner) == (2, True)


def test_a_replaced_entry_after_damage_is_accepted_if_the_one_before_has_its_term() -> None:
    metalog = metalog_of(1, 1, 2)
    metalog.doubt(FrameKind.METALOG)
    metalog.recover(encode_entry(entry(2, epoch=1)))
    metalog.recovered()
    assert (metalog.extent, metalog.learner) == (Extent(Epoch(1), 3), False)


@pytest.mark.parametrize("kind", [None, FrameKind.METALOG_STATE])
def test_a_frame_that_may_have_held_a_promise_makes_a_learner(kind: FrameKind | None) -> None:
    metalog = metalog_of(1, 1)
    metalog.doubt(kind)
    metalog.recover(encode_entry(entry(2)))
    metalog.recovered()
    assert (len(metalog), metalog.learner) == (3, True)


def test_a_later_state_with_the_extent_of_the_copy_resolves_the_damage_before_it() -> None:
    metalog = metalog_of(1, 1)
    metalog.doubt(None)
    metalog.recover(state(last=1, length=2), FrameKind.METALOG_STATE)
    metalog.recovered()
    assert (metalog.learner, metalog.promised) == (False, 3)


def test_a_later_state_with_another_extent_makes_a_learner_and_keeps_the_promise() -> None:
    metalog = metalog_of(1, 1)
    metalog.doubt(None)
    metalog.recover(state(last=1, length=3), FrameKind.METALOG_STATE)
    metalog.recover(encode_entry(entry(3)))
    metalog.recovered()
    assert (len(metalog), metalog.learner, metalog.promised) == (2, True, 3)


def test_a_learner_stays_one_until_its_disk_says_otherwise() -> None:
    metalog = metalog_of(1)
    metalog.doubt(None)
    metalog.recovered()
    again = metalog_of(1)
    again.doubt(None)
    again.recover(metalog.mark(learner=True).payload, FrameKind.METALOG_STATE)
    again.recover(encode_entry(entry(1)))
    again.recovered()
    assert (len(again), again.learner) == (2, True)
    done = again.mark(learner=False)
    assert again.learner, "not durable yet"
    again.on_persisted(done.token)
    assert not again.learner


# --- cutting off


def test_entries_that_are_cut_off_are_gone_and_not_stored() -> None:
    metalog = metalog_of(1, 1, 1)
    metalog.cut_off(1)
    assert (len(metalog), metalog.stored) == (1, 1)
    assert metalog.page(0, 9) == (entry(0),)


def test_a_frame_of_an_entry_that_was_cut_off_makes_nothing_stored() -> None:
    metalog = metalog_of(1)
    old = [metalog.append(entry(position)) for position in (1, 2)]
    metalog.cut_off(2)
    new = metalog.append(entry(2, epoch=2))
    for persist, stored in zip([*old, new], (2, 2, 3), strict=True):
        metalog.on_persisted(persist.token)
        assert metalog.stored == stored


def test_recovery_replaces_all_entries_from_a_frame_below_the_end_on() -> None:
    metalog = metalog_of(1, 1, 1)
    metalog.recover(encode_entry(entry(1, epoch=2)))
    assert metalog.page(0, 9) == (entry(0), entry(1, epoch=2))
    assert metalog.stored == 2
    assert metalog.append(entry(2, epoch=2)).token == 4


def test_entries_that_are_cut_off_are_recovered_until_another_is_stored_in_their_place() -> None:
    before = StoredMetalog()
    frames = [before.append(entry(position)).payload for position in range(3)]
    before.cut_off(1)
    after = StoredMetalog()
    for payload in frames:
        after.recover(payload)
    assert len(after) == 3
    after.recover(before.append(entry(1, epoch=2)).payload)
    assert after.page(0, 9) == before.page(0, 9)


@pytest.mark.parametrize("end", [-1, 3])
def test_cutting_off_beyond_the_end_trips_an_assertion(end: int) -> None:
    with pytest.raises(AssertionError):
        metalog_of(1, 1).cut_off(end)


# --- comparing


def test_an_entry_has_the_incarnation_that_proposed_it() -> None:
    metalog = metalog_of(1, 1, 3)
    assert [metalog.epoch_before(end) for end in range(4)] == [0, 1, 1, 3]


@pytest.mark.parametrize(
    ("epoch", "length", "agreed"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (1, 2, 2),
        (1, 9, 2),
        (2, 3, 2),
        (3, 3, 3),
        (3, 9, 4),
        (4, 5, 4),
        (5, 5, 5),
        (5, 9, 5),
        (7, 9, 5),
    ],
)
def test_a_copy_agrees_up_to_the_surviving_entries_of_its_incarnation(
    epoch: int, length: int, agreed: int
) -> None:
    assert metalog_of(1, 1, 3, 3, 5).agreement(Epoch(epoch), length) == agreed


def common_length(one: StoredMetalog, other: StoredMetalog) -> int:
    """Find the position where two copies begin to differ, as primaries do."""
    end = min(len(one), len(other))
    while not other.fits(end, one.epoch_before(end)):
        after = one.agreement(*other.common(end, one.epoch_before(end)))
        assert after < end, "it ends"
        end = after
    return end


@given(st.lists(st.integers(1, 4), max_size=8), st.lists(st.integers(1, 4), max_size=8))
def test_the_place_where_copies_part_is_found(one: list[int], other: list[int]) -> None:
    """Two copies of Raft: terms ascend, and entries of one term at one position come with equal
    prefixes.
    """
    one, other = sorted(one), sorted(other)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    other = other[:shared] + [2 * term + 11 for term in other[shared:]]
    one = one[:shared] + [2 * term + 10 for term in one[shared:]]
    assert common_length(metalog_of(*one), metalog_of(*other)) == shared


def test_a_checkpoint_counts_no_entry_as_committed_that_no_majority_has() -> None:
    """Otherwise a restarted primary would publish entries that it may still have to replace."""
    metalog = StoredMetalog(sole=True)
    entries = [entry(position, epoch=1) for position in range(5)]
    for number, one in enumerate(entries):
        metalog.append(one)
        metalog.on_persisted(number)
    metalog.commit(2)
    again = StoredMetalog(sole=True)
    again.restore(metalog.checkpoint()())
    assert (again.committed.position, again.stored, len(again)) == (2, 5, 5)
    assert again.page(0, 5) == tuple(entries)
    assert again.extent == metalog.extent


# --- views


def with_view(position: int, number: int, *, epoch: int = 1) -> NewView:
    view = msgspec.structs.replace(view_of(sequencers=3), number=ViewNumber(number))
    return NewView(position, ViewNumber(number), Epoch(epoch), view)


def views_of(metalog: StoredMetalog) -> tuple[int, int]:
    """The number of the newest view, 0 for none, and the end of its entry."""
    view: View | None = metalog.view
    return (0 if view is None else view.number, metalog.view_end)


def test_the_newest_view_is_that_of_the_entries_that_are_left() -> None:
    metalog = StoredMetalog()
    assert views_of(metalog) == (0, 0)
    for entry_ in (entry(0), with_view(1, 2), entry(2), with_view(3, 3)):
        metalog.append(entry_)
    assert views_of(metalog) == (3, 4)
    metalog.cut_off(3)
    assert views_of(metalog) == (2, 2)
    metalog.cut_off(1)
    assert views_of(metalog) == (0, 0)


def test_the_newest_view_survives_replay_checkpoints_and_bases() -> None:
    before, after, again = StoredMetalog(), StoredMetalog(), StoredMetalog()
    for entry_ in (entry(0), with_view(1, 2), entry(2)):
        frame = before.append(entry_)
        before.on_persisted(frame.token)
        after.recover(frame.payload)
    again.restore(before.checkpoint()())
    assert views_of(after) == views_of(again) == (2, 2)
    base = Base().with_entries(before.page(0, 3))
    other = StoredMetalog()
    other.append(with_view(0, 7))
    other.install(base)
    assert views_of(other) == (2, 3)


def test_views_are_found_in_a_checkpoint_that_does_not_name_them() -> None:
    before, after = StoredMetalog(), StoredMetalog()
    for entry_ in (entry(0), with_view(1, 2)):
        before.on_persisted(before.append(entry_).token)
    columns = msgspec.msgpack.decode(before.checkpoint()())
    after.restore(msgspec.msgpack.encode(columns[:-1]))
    assert views_of(after) == (2, 2)


def test_entries_that_become_a_base_leave_their_view_in_it() -> None:
    metalog = StoredMetalog(kept=4)
    for position in range(20):
        one = with_view(position, 2) if position == 1 else entry(position)
        metalog.on_persisted(metalog.append(one).token)
    while metalog.fold(20):
        pass
    assert metalog.base.position > 1
    assert views_of(metalog) == (2, metalog.base.position)
