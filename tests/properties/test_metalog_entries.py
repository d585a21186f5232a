"""Packed metalog entries equal a list of the same entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.kernel.metalog import Entry, NewRecords, Trim, decode_entries
from indilog_ordering import entries
from indilog_ordering.entries import Entries

ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("cut off"), st.floats(0, 1), st.booleans()),
)


def entry_at(position: int, epoch: int, *, is_trim: bool) -> Entry:
    view, of = ViewNumber(1), Epoch(epoch)
    if is_trim:
        return Trim(position, view, of, 0, ())
    return NewRecords(position, view, of, {ShardId(0): 1 + position}, position)


@given(st.integers(1, 5), st.integers(0, 7), st.lists(ACTIONS, max_size=80))
def test_packed_entries_behave_like_a_list(
    page: int, unpacked_min: int, actions: list[tuple[str, float, bool]]
) -> None:
    model: list[Entry] = []
    packed = Entries(page=page, unpacked_min=unpacked_min)
    for action, value, is_trim in actions:
        if action == "append":
            epoch = (model[-1].epoch if model else 1) + int(value)
            entry = entry_at(len(model), epoch, is_trim=is_trim)
            model.append(entry)
            packed.append(entry)
        else:
            end = int(value * len(model))
            del model[end:]
            packed.cut_off(end)
        check_same(packed, model)


def check_same(packed: Entries, model: list[Entry]) -> None:
    assert packed.end == len(model)
    assert [packed[position] for position in range(len(model))] == model
    for start in range(len(model) + 2):
        for end in (start - 1, start, start + 1, start + 4, len(model) + 1):
            assert packed.between(start, end) == tuple(model[start : max(end, 0)])
            assert list(packed.iterate(start, end)) == model[start : max(end, 0)]
    last = model[-1].epoch if model else 0
    for epoch in range(last + 2):
        assert packed.end_older(Epoch(epoch)) == sum(e.epoch < epoch for e in model)
        assert packed.end_not_newer(Epoch(epoch)) == sum(e.epoch <= epoch for e in model)


def test_an_iteration_unpacks_each_pack_once_when_it_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = Entries(page=4, unpacked_min=0)
    for position in range(42):
        packed.append(entry_at(position, 1, is_trim=False))
    unpacked: list[bytes] = []

    def counted(payload: bytes) -> tuple[Entry, ...]:
        unpacked.append(payload)
        return decode_entries(payload)

    monkeypatch.setattr(entries, "decode_entries", counted)
    counts = [len(unpacked) for _ in packed.iterate(0, 42)]
    assert counts == [1 + min(position, 39) // 4 for position in range(42)]


def test_a_packed_entry_takes_a_few_bytes() -> None:
    packed = Entries()
    for position in range(20 * entries.PAGE):
        packed.append(entry_at(position, 1, is_trim=False))
    sizes = [len(pack) for pack in packed._packed]
    assert len(packed._newest) < entries.UNPACKED_MIN + entries.PAGE
    assert sum(sizes) / len(sizes) / entries.PAGE < 12
