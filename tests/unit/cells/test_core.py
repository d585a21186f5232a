"""The client of a log over cells, call by call."""

from __future__ import annotations

from indilog.base.ids import tag_columns
from indilog_cells.content import JUNK, Condition, End, Records, decode, encode
from indilog_cells.core import CORE_LIMITS, Core, CoreLimits
from indilog_cells.core_events import (
    AskToken,
    CaughtUp,
    CellFailed,
    CellRead,
    CellTaken,
    CellWritten,
    Effect,
    Event,
    ItemApplied,
    ReadCell,
    TokenGiven,
    WriteCell,
)
from indilog_cells.state import LogState, Placed

COLUMNS = tag_columns("log", ("t",))


def record(data: bytes, after: Condition | None = None) -> Records:
    return Records(0, [COLUMNS.tags], [COLUMNS.names], [data], after)


def begun(limits: CoreLimits = CORE_LIMITS, writer: bytes = b"me") -> Core:
    """Return a core that has read that the log is empty."""
    core = Core(LogState(), writer, limits)
    core.catch_up(0)
    assert core.handle([], 0) == [ReadCell(0)]
    assert core.handle([CellRead(0, None)], 0) == [CaughtUp(0)]
    return core


def submit(core: Core, *data: bytes, now_us: int = 0) -> list[Effect]:
    for number, each in enumerate(data):
        core.submit(100 + number, record(each))
    effects = core.handle([], now_us)
    core.check_invariants()
    return effects


def written(effects: list[Effect]) -> WriteCell:
    (effect,) = effects
    assert isinstance(effect, WriteCell)
    return effect


def foreign(data: bytes) -> bytes:
    """Return a cell of another writer in the same epoch."""
    core = begun(writer=b"other")
    submit(core, data)
    return written(core.handle([TokenGiven(0)], 0)).content


def test_appends_of_one_turn_share_a_cell_and_get_consecutive_seqnums() -> None:
    core = begun()
    assert submit(core, b"a", b"b", b"c") == [AskToken(0)]
    write = written(core.handle([TokenGiven(0)], 0))
    content = decode(write.content)
    assert content is not None
    data = [item.data for item in content.items if isinstance(item, Records)]
    assert data == [[b"a", b"b", b"c"]]
    assert core.handle([CellWritten(0, write.content)], 0) == [
        ItemApplied(100, Placed(0)), ItemApplied(101, Placed(1)), ItemApplied(102, Placed(2)),
    ]  # fmt: skip


def test_the_first_append_reads_up_to_the_first_unwritten_cell() -> None:
    core = Core(LogState(), b"me")
    assert submit(core, b"a") == [ReadCell(0)]
    assert core.handle([CellRead(0, None)], 0) == [AskToken(0)]


def test_records_of_a_taken_cell_go_to_a_later_one_after_catching_up() -> None:
    core = begun()
    submit(core, b"mine")
    written(core.handle([TokenGiven(0)], 0))
    assert core.handle([CellTaken(0)], 0) == [ReadCell(0)]
    effects = core.handle([CellRead(0, foreign(b"theirs"))], 0)
    assert effects == [ReadCell(1), ReadCell(2)]
    assert core.handle([CellRead(2, None)], 0) == []
    assert core.handle([CellRead(1, None)], 0) == [AskToken(1)]
    write = written(core.handle([TokenGiven(1)], 0))
    assert core.handle([CellWritten(1, write.content)], 0) == [ItemApplied(100, Placed(1))]


def test_an_unknown_outcome_is_cleared_by_the_same_cell() -> None:
    core = begun()
    submit(core, b"mine")
    write = written(core.handle([TokenGiven(0)], 0))
    assert core.handle([CellFailed(0, is_write=True)], 0) == []
    assert core.deadline_us() is not None
    assert core.handle([], 10_000_000) == [write]
    assert core.handle([CellTaken(0)], 10_000_000) == [ReadCell(0)]
    applied = core.handle([CellRead(0, write.content)], 10_000_000)
    assert ItemApplied(100, Placed(0)) in applied


def test_an_append_waits_for_the_cells_below_and_fills_them_after_a_time() -> None:
    core = begun(CoreLimits(fill_after_us=1000))
    submit(core, b"mine")
    write, read = core.handle([TokenGiven(2)], 0)
    assert isinstance(write, WriteCell)
    assert read == ReadCell(0)
    assert core.handle([CellWritten(2, write.content)], 0) == []
    assert core.handle([CellRead(0, None)], 1) == []
    assert core.handle([], 1000) == [WriteCell(0, JUNK)]
    assert core.handle([CellWritten(0, JUNK)], 1001) == [ReadCell(1)]
    core.handle([CellRead(1, None)], 1002)
    assert WriteCell(1, JUNK) in core.handle([], 2001)
    assert core.handle([CellTaken(1)], 2002) == [ReadCell(1)]
    effects = core.handle([CellRead(1, foreign(b"slow"))], 2003)
    assert ItemApplied(100, Placed(1)) not in effects, "the slow writer had begun the same epoch"
    assert AskToken(3) in effects


def test_a_silent_sequencer_is_done_without() -> None:
    core = begun(CoreLimits(token_after_us=1000))
    assert submit(core, b"mine") == [AskToken(0)]
    assert core.handle([], 999) == []
    assert written(core.handle([], 1000)).position == 0
    assert core.handle([TokenGiven(5)], 1001) == [WriteCell(5, JUNK)], "others need not wait"


def test_a_token_below_the_applied_cells_is_asked_for_again() -> None:
    core = begun()
    submit(core, b"a")
    write = written(core.handle([TokenGiven(0)], 0))
    core.handle([CellWritten(0, write.content)], 0)
    assert submit(core, b"b") == [AskToken(1)]
    assert core.handle([TokenGiven(0)], 0) == [AskToken(1)]


def test_catching_up_needs_a_read_that_begins_later() -> None:
    core = begun()
    core.catch_up(1)
    assert core.handle([], 0) == [ReadCell(0)]
    core.catch_up(2)
    assert core.handle([], 0) == []
    assert core.handle([CellRead(0, None)], 0) == [CaughtUp(1), ReadCell(0)]
    assert core.handle([CellRead(0, None)], 0) == [CaughtUp(2)]


def test_reading_ahead_grows_up_to_its_limit() -> None:
    core = begun(CoreLimits(read_ahead=4))
    core.catch_up(1)
    asked = core.handle([], 0)
    position, most = 0, 0
    cell = foreign(b"x")
    events: list[Event] = []
    while position < 12:
        reads = [effect.position for effect in asked if isinstance(effect, ReadCell)]
        most = max(most, len(core._reading))
        events = [CellRead(each, cell if each < 12 else None) for each in reads]
        asked = core.handle(events, 0)
        position = core.state.position
    assert most == 4


def test_an_item_that_is_in_no_cell_can_be_withdrawn() -> None:
    core = begun()
    submit(core, b"a")
    assert core.withdraw(100)
    assert not core.withdraw(100)
    assert core.handle([TokenGiven(0)], 0) == [WriteCell(0, JUNK)]


def test_items_beyond_the_bytes_of_a_cell_go_to_the_next_one() -> None:
    core = begun(CoreLimits(cell_bytes=1000))
    effects = submit(core, bytes(700), bytes(700), bytes(5000))
    claimed = written(core.handle([TokenGiven(0)], 0))
    assert effects == [AskToken(0)]
    applied = core.handle([CellWritten(0, claimed.content)], 0)
    assert applied == [ItemApplied(100, Placed(0)), AskToken(1)]
    sizes = []
    for position in (1, 2):
        effect = core.handle([TokenGiven(position)], 0)[0]
        assert isinstance(effect, WriteCell)
        sizes.append(len(effect.content))
    assert 700 < sizes[0] < 1000
    assert sizes[1] > 5000


def test_conditional_records_keep_an_item_of_their_own() -> None:
    core = begun()
    condition = Condition(1, 2, -1, 0)
    for ticket, item in enumerate([record(b"a"), record(b"b", condition), record(b"c")]):
        core.submit(ticket, item)
    core.handle([], 0)
    content = decode(written(core.handle([TokenGiven(0)], 0)).content)
    assert content is not None
    assert len(content.items) == 3
    assert encode(content)


def test_a_writer_that_loses_cells_leaves_the_next_ones_to_the_faster_writer() -> None:
    core = begun()
    submit(core, b"mine")
    asked: list[int] = []
    for position in range(4):
        core.handle([TokenGiven(position)], 0)
        core.handle([CellTaken(position)], 0)
        core.handle([CellRead(position, foreign(b"theirs"))], 0)
        asked += [
            effect.at_least - position - 1
            for _ in range(2)  # the first read may have begun before the cell was taken
            for effect in core.handle([CellRead(position + 1, None)], 0)
            if isinstance(effect, AskToken)
        ]
    assert asked == [0, 1, 2, 3]


def test_the_end_of_a_log_leaves_no_cells_to_others() -> None:
    core = begun()
    core.submit(100, End())
    core.handle([], 0)
    asked: list[int] = []
    for position in range(4):
        core.handle([TokenGiven(position)], 0)
        core.handle([CellTaken(position)], 0)
        core.handle([CellRead(position, foreign(b"theirs"))], 0)
        asked += [
            effect.at_least - position - 1
            for _ in range(2)  # the first read may have begun before the cell was taken
            for effect in core.handle([CellRead(position + 1, None)], 0)
            if isinstance(effect, AskToken)
        ]
    assert asked == [0, 0, 0, 0]
