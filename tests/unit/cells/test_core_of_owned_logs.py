"""The client of a log that has an owner, call by call (decision 0096)."""

from __future__ import annotations

from indilog_cells.content import AskTime, Content, Records, decode, encode
from indilog_cells.core import Core
from indilog_cells.core_events import (
    AppendsElsewhere,
    AskToken,
    CellDeposed,
    CellRead,
    CellWritten,
    ContentAnswered,
    ContentApplied,
    Effect,
    ItemApplied,
    ReadCell,
    SendContent,
    TokenFailed,
    TokenGiven,
    WriteCell,
)
from indilog_cells.index import GenerationLimits
from indilog_cells.state import Applied, LogState, Placed
from tests.unit.cells.test_core import begun, record, submit, written


def content_of(written: WriteCell | SendContent) -> Content:
    content = decode(written.content)
    assert content is not None
    return content


def data_of(content: Content) -> list[bytes]:
    return [data for item in content.items if isinstance(item, Records) for data in item.data]


def sent(effects: list[Effect]) -> SendContent:
    (effect,) = effects
    assert isinstance(effect, SendContent)
    return effect


def sending(core: Core, *data: bytes) -> SendContent:
    """Submit records and let the core send them to the owner `a`."""
    (asked,) = submit(core, *data)
    assert isinstance(asked, AskToken)
    return sent(core.handle([AppendsElsewhere("a")], 0))


def cell(core: Core, serial: int, data: bytes, epoch: int = 1) -> bytes:
    """Return a cell in which an owner wrote a content of the core."""
    return encode(Content(epoch, True, core.writer, serial, 0, [record(data)]))


def after_barrier(core: Core) -> list[Effect]:
    """Append the barrier through the owner `b`; return what follows."""
    barrier = sent(core.handle([AppendsElsewhere("b")], 0))
    assert barrier.owner == "b"
    assert content_of(barrier).items == [AskTime()]
    effects = core.handle([ContentAnswered(barrier.serial, [Applied(5)])], 0)
    core.check_invariants()
    return effects


def test_items_go_to_the_owner_and_get_their_outcomes_from_it() -> None:
    core = begun()
    first = sending(core, b"x", b"y")
    assert (first.owner, data_of(content_of(first))) == ("a", [b"x", b"y"])
    answered = ContentAnswered(first.serial, [Placed(7)])
    assert core.handle([answered], 0) == [ItemApplied(100, Placed(7)), ItemApplied(101, Placed(8))]
    assert core.handle([answered], 0) == [], "a second answer finds nothing"
    assert core.in_flight == core.waiting == 0


def test_a_content_without_an_answer_is_found_in_its_cell() -> None:
    core = begun()
    lost = sending(core, b"x")
    (asked,) = core.handle([ContentAnswered(lost.serial, None)], 0)
    assert isinstance(asked, AskToken)
    assert after_barrier(core) == [ReadCell(0)]
    effects = core.handle([CellRead(0, cell(core, lost.serial, b"x"))], 0)
    assert ItemApplied(100, Placed(0)) in effects
    assert core.handle([CellRead(1, None)], 0) == []
    assert core.waiting == core.in_flight == 0


def test_a_content_that_is_in_no_cell_up_to_the_barrier_is_appended_again() -> None:
    core = begun()
    lost = sending(core, b"x")
    core.handle([ContentAnswered(lost.serial, None)], 0)
    assert after_barrier(core) == [ReadCell(0)]
    (asked,) = core.handle([CellRead(0, None)], 0)
    assert isinstance(asked, AskToken)
    again = sent(core.handle([AppendsElsewhere("b")], 0))
    assert data_of(content_of(again)) == [b"x"]
    assert again.serial > lost.serial


def test_a_content_in_a_void_cell_is_not_in_the_log() -> None:
    core = begun()
    lost = sending(core, b"x")
    core.handle([ContentAnswered(lost.serial, None)], 0)
    assert after_barrier(core) == [ReadCell(0)]
    newer = encode(Content(2, True, b"b", 0, 0, [AskTime()]))
    core.handle([CellRead(0, newer)], 0)
    core.handle([CellRead(1, cell(core, lost.serial, b"x", epoch=1))], 0)
    core.handle([CellRead(2, None)], 0)
    again = sent(core.handle([AppendsElsewhere("b")], 0))
    assert data_of(content_of(again)) == [b"x"]


def test_a_lost_barrier_is_appended_again() -> None:
    core = begun()
    lost = sending(core, b"x")
    core.handle([ContentAnswered(lost.serial, None)], 0)
    barrier = sent(core.handle([AppendsElsewhere("b")], 0))
    (asked,) = core.handle([ContentAnswered(barrier.serial, None)], 0)
    assert isinstance(asked, AskToken)
    assert after_barrier(core) == [ReadCell(0)]


def test_a_barrier_settles_only_what_was_unsettled_before_it() -> None:
    core = begun()
    first = sending(core, b"x")
    core.submit(200, record(b"y"))
    core.handle([], 0)
    second = sent(core.handle([AppendsElsewhere("a")], 0))
    core.handle([ContentAnswered(first.serial, None)], 0)
    barrier = sent(core.handle([AppendsElsewhere("b")], 0))
    core.handle([ContentAnswered(second.serial, None)], 0)
    core.handle([ContentAnswered(barrier.serial, [Applied(5)])], 0)
    core.handle([CellRead(0, None)], 0)
    again = sent(core.handle([AppendsElsewhere("c")], 0))
    assert data_of(content_of(again)) == [b"x"]
    assert AskTime() in content_of(again).items, "the second one needs another barrier"


def test_the_owner_writes_the_content_of_another_process_with_its_writer_and_serial() -> None:
    core = begun()
    core.submit_content(1, Content(0, False, b"other", 3, 9, [record(b"x"), AskTime()]))
    (asked,) = core.handle([], 0)
    assert isinstance(asked, AskToken)
    wrote = written(core.handle([TokenGiven(0)], 0))
    content = content_of(wrote)
    assert (content.writer, content.serial) == (b"other", 3)
    assert (content.epoch, content.is_claim) == (1, True)
    effects = core.handle([CellWritten(0, wrote.content)], 0)
    assert effects == [ContentApplied(1, [Placed(0), Applied(core.state.time_us)])]


def test_contents_of_others_and_own_items_are_written_alternately() -> None:
    core = begun()
    submit(core, b"own")
    for ticket in range(2):
        core.submit_content(ticket, Content(0, False, b"other", ticket, 0, [record(b"x")]))
    writers = []
    for position in range(3):
        wrote = written(core.handle([TokenGiven(position)], 0)[:1])
        writers.append(content_of(wrote).writer)
        core.submit(300 + position, record(b"own"))
        core.handle([CellWritten(position, wrote.content)], 0)
    assert writers == [b"other", b"me", b"other"]


def test_an_owner_gives_up_what_it_was_sent_when_its_tenure_ends() -> None:
    core = begun()
    for ticket in range(2):
        core.submit_content(ticket, Content(0, False, b"other", ticket, 0, [record(b"x")]))
    core.handle([], 0)
    written(core.handle([TokenGiven(0)], 0))
    effects = core.handle([CellDeposed(0)], 0)
    assert sorted(effects) == [ContentApplied(0, None), ContentApplied(1, None)]
    assert core.in_flight == 0
    assert core.handle([], 0) == [], "nothing is appended later"


def test_an_own_content_of_an_ended_tenure_is_unsettled() -> None:
    core = begun()
    submit(core, b"x")
    lost = written(core.handle([TokenGiven(0)], 0))
    (asked,) = core.handle([CellDeposed(0)], 0)
    assert isinstance(asked, AskToken)
    assert after_barrier(core) == [ReadCell(0)]
    effects = core.handle([CellRead(0, lost.content)], 0)
    assert ItemApplied(100, Placed(0)) in effects


def test_each_tenure_begins_a_later_epoch() -> None:
    core = begun()
    submit(core, b"x")
    first = written(core.handle([TokenGiven(0, begins_tenure=True)], 0))
    core.handle([CellWritten(0, first.content)], 0)
    submit(core, b"y")
    second = written(core.handle([TokenGiven(1)], 0))
    core.handle([CellWritten(1, second.content)], 0)
    submit(core, b"z")
    third = written(core.handle([TokenGiven(2, begins_tenure=True)], 0))
    contents = [content_of(each) for each in (first, second, third)]
    assert [(each.epoch, each.is_claim) for each in contents] == [(1, True), (1, False), (2, True)]


def test_a_process_that_skips_cells_does_not_know_what_became_of_its_contents() -> None:
    core = begun()
    unsettled = sending(core, b"x")
    core.submit(200, record(b"y"))
    core.handle([], 0)
    pending = sent(core.handle([AppendsElsewhere("a")], 0))
    core.handle([ContentAnswered(unsettled.serial, None)], 0)
    newer = LogState(GenerationLimits(cells=6))
    newer.apply(None)
    assert ItemApplied(100, None) in core.restart(newer, 0)
    assert ItemApplied(200, None) in core.handle([ContentAnswered(pending.serial, None)], 0)


def test_a_token_is_asked_for_again_after_a_failure() -> None:
    core = begun()
    submit(core, b"x")
    assert core.handle([TokenFailed()], 0) == []
    deadline = core.deadline_us()
    assert deadline is not None
    (asked,) = core.handle([], deadline)
    assert isinstance(asked, AskToken)
