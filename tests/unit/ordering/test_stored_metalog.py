"""Claims about a sequencer's copy of the metalog."""

from __future__ import annotations

import pytest

from indilog.errors import MalformedFrameError
from indilog.ids import Epoch, ShardId, ViewNumber
from indilog.metalog import NewRecords, entry_encoded
from indilog.roles import FrameKind
from ordering.stored_metalog import StoredMetalog


def entry(position: int) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(1), {ShardId(0): position + 1})


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


def test_an_entry_out_of_order_is_our_own_mistake() -> None:
    metalog = StoredMetalog()
    with pytest.raises(AssertionError):
        metalog.append(entry(1))
    with pytest.raises(AssertionError):
        metalog.recover(entry_encoded(entry(1)))


def test_persisting_out_of_order_is_our_own_mistake() -> None:
    metalog = StoredMetalog()
    metalog.append(entry(0))
    metalog.append(entry(1))
    with pytest.raises(AssertionError):
        metalog.on_persisted(1)


def test_a_frame_that_holds_no_entry_is_malformed() -> None:
    with pytest.raises(MalformedFrameError):
        StoredMetalog().recover(b"\x00")
