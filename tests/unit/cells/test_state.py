"""What follows from the cells of a log, in order."""

from __future__ import annotations

from indilog.base.ids import tag_columns, unpack_tags
from indilog.base.retention import Retention
from indilog_cells.content import AskTime, Condition, Content, End, Item, Policy, Records, TrimBelow
from indilog_cells.index import CellPlace, GenerationLimits
from indilog_cells.state import (
    Applied,
    BelowFloor,
    CheckedTooEarly,
    Contradicted,
    Ended,
    LogState,
    Placed,
)

COLUMNS = tag_columns("log", ("t",))
LOG, TAG = unpack_tags(COLUMNS.tags)


def records(count: int = 1, after: Condition | None = None) -> Records:
    return Records(0, [COLUMNS.tags] * count, [COLUMNS.names] * count, [b"x"] * count, after)


def cell(*items: Item, epoch: int = 1, stamp_us: int = 1, claim: bool = False) -> Content:
    return Content(epoch, claim, b"w", 0, stamp_us, list(items))


def test_seqnums_are_dense_although_cells_are_junk_or_void() -> None:
    state = LogState()
    assert state.apply(cell(records(2), epoch=2)) == [Placed(0)]
    assert state.apply(None) == []
    assert state.apply(cell(records(5), epoch=1)) is None
    assert state.apply(cell(records(1), epoch=2)) == [Placed(2)]
    assert (state.position, state.tail) == (4, 3)


def test_a_claim_is_void_in_an_epoch_that_has_begun() -> None:
    state = LogState()
    assert state.apply(cell(records(), epoch=1, claim=True)) == [Placed(0)]
    assert state.apply(cell(records(), epoch=1, claim=True)) is None
    assert state.apply(cell(records(), epoch=1)) == [Placed(1)]


def test_a_condition_holds_only_after_the_last_record_with_its_tag() -> None:
    state = LogState()
    state.apply(cell(records(3)))
    condition = Condition(LOG, TAG, 2, 3)
    assert state.apply(cell(records(1, condition), records(1, condition))) == [
        Placed(3), Contradicted(3),
    ]  # fmt: skip
    state.apply(cell(TrimBelow(LOG, None, 4)))
    assert state.apply(cell(records(1, condition))) == [BelowFloor(4)]
    assert state.apply(cell(records(1, Condition(LOG, TAG, 3, 4)))) == [Placed(4)]


def test_a_condition_that_was_checked_before_the_open_generation_is_checked_again() -> None:
    state = LogState(GenerationLimits(cells=2))
    for _ in range(2):
        state.apply(cell(records()))
        state.close_generation()
    assert state.apply(cell(records(1, Condition(LOG, TAG, 0, 1)))) == [CheckedTooEarly()]
    assert state.apply(cell(records(1, Condition(LOG, TAG, 1, 2)))) == [Placed(2)]


def test_records_after_a_failed_condition_are_found() -> None:
    state = LogState()
    failing = records(4, Condition(LOG, TAG, -1, 0))
    state.apply(cell(AskTime(), records(2), failing, records(3)))
    places = [state.open.table.place(seqnum)[0] for seqnum in range(5)]
    assert places == [
        CellPlace(0, 1, 0), CellPlace(0, 1, 1), CellPlace(0, 3, 0), CellPlace(0, 3, 1),
        CellPlace(0, 3, 2),
    ]  # fmt: skip


def test_an_ended_log_takes_no_records_but_floors() -> None:
    state = LogState(GenerationLimits(cells=3))
    conditional = records(1, Condition(LOG, TAG, 1, 2))
    assert state.apply(cell(records(2), End(), records())) == [Placed(0), Applied(1), Ended()]
    assert state.apply(cell(conditional, End())) == [Ended(), Applied(1)]
    assert state.apply(cell(TrimBelow(LOG, None, 1))) == [Applied(1)]
    complete = state.close_generation()
    assert complete is not None
    restored = LogState.restored(complete.checkpoint)
    assert restored.apply(cell(records())) == [Ended()]
    assert (restored.tail, restored.floor(LOG, None)) == (2, 1)


def test_the_time_of_the_log_never_goes_back() -> None:
    state = LogState()
    assert state.apply(cell(AskTime(), stamp_us=50)) == [Applied(50)]
    assert state.apply(cell(AskTime(), stamp_us=20)) == [Applied(50)]


def test_floors_only_grow_and_end_at_the_tail() -> None:
    state = LogState()
    state.apply(
        cell(records(5), TrimBelow(LOG, TAG, 3), TrimBelow(LOG, None, 2), TrimBelow(LOG, None, 1))
    )
    assert (state.floor(LOG, TAG), state.floor(LOG, None)) == (3, 2)
    state.apply(cell(TrimBelow(LOG, None, 99)))
    assert state.floor(LOG, None) == 5
    assert state.dead_below == 5


def test_a_checkpoint_restores_the_state() -> None:
    state = LogState(GenerationLimits(cells=3))
    state.apply(cell(records(4), Policy("log", 5.0, None), epoch=7, stamp_us=9))
    state.apply(cell(TrimBelow(LOG, TAG, 3), Policy("other", None, None), epoch=7))
    state.apply(None)
    complete = state.close_generation()
    assert complete is not None
    restored = LogState.restored(complete.checkpoint)
    for name in (
        "position",
        "tail",
        "time_us",
        "epoch",
        "generations",
        "floors",
        "log_floors",
        "policies",
    ):
        assert getattr(restored, name) == getattr(state, name), name
    assert restored.policies == {"log": Retention(age_s=5.0)}
    assert restored.generations[0].tail == 4


def test_trimmed_generations_leave_the_state() -> None:
    state = LogState(GenerationLimits(cells=1))
    for _ in range(3):
        state.apply(cell(records()))
        assert state.close_generation() is not None
    state.apply(cell(TrimBelow(LOG, None, 2)))
    complete = state.close_generation()
    assert complete is not None
    assert complete.has_trimmed
    assert [info.first for info in state.generations] == [2, 3]
