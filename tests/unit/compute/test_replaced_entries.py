"""An engine whose primary lost published entries and proposed others."""

from __future__ import annotations

import msgspec

from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.ids import Epoch, ViewNumber
from indilog.kernel.metalog import Base, NewRecords
from indilog.roles.role import AnswerAppends, Effect, Ignore, Received, Send
from indilog.wire.base_messages import MetalogBase
from indilog.wire.messages import (
    AppendBatch,
    IndexData,
    IndexLookup,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    TailIs,
    TailWanted,
)
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import (
    JOIN,
    PRIMARY,
    SHARD,
    TAG,
    A,
    Driver,
    answered,
    answers,
    carrying,
    joined,
    sends,
)

WRITERS = {SHARD: Epoch(1)}


def of(epoch: int, position: int, count: int) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {SHARD: count})


def from_primary(
    driver: Driver, message: MetalogEntries | MetalogBase | TailIs, life: int
) -> list[Effect]:
    return driver.turn(Received(PRIMARY, message, Epoch(life)))


def after_a_replacement(driver: Driver) -> list[Effect]:
    """Deliver from incarnation 2 another entry at 1 than the applied one."""
    hello = MetalogEntries(1, Epoch(1), (), committed=1)
    ((_, asked),) = sends(from_primary(driver, hello, 2), MetalogWanted)
    assert isinstance(asked, MetalogWanted)
    assert (asked.start, asked.last) == (2, 1)
    answer = entries_message([of(2, 1, 5)], previous=1, request=asked.request)
    return from_primary(driver, answer, 2)


def test_an_engine_that_applied_replaced_entries_joins_again() -> None:
    driver = joined()
    driver.order(1)
    driver.order(1)
    driver.read(9, position=9)
    effects = after_a_replacement(driver)
    assert driver.engine.position == 0
    (reported,) = answers(effects)
    assert isinstance(reported, NotReadyError)
    ((_, question),) = sends(effects, TailWanted)
    assert isinstance(question, TailWanted)
    assert question.request != JOIN, "the answer to the first join does not answer this one"
    from_primary(driver, TailIs(question.request, 2, 6, {SHARD: 6}, Epoch(2), writers=WRITERS), 2)
    assert driver.engine.ready
    assert (driver.engine.position, driver.engine.tail) == (2, 6)
    assert driver.engine.tag_position == 2, "no row of the earlier index is left"


def test_the_caches_are_empty_after_joining_again() -> None:
    driver = joined()
    driver.engine.append(b"mine", carrying(TAG), "caller")
    driver.turn()
    driver.order(1)
    assert driver.engine.status()["record_cache"]["entries"] == 1
    driver.order(1)
    after_a_replacement(driver)
    assert driver.engine.status()["record_cache"]["entries"] == 0


def test_an_append_that_was_ordered_while_joining_again_has_an_unknown_outcome() -> None:
    driver = joined()
    driver.order(1)
    driver.order(1)
    driver.engine.append(b"lost sight of", carrying(TAG), "first")
    driver.turn()
    driver.engine.append(b"still under way", carrying(TAG), "second")
    driver.turn()
    ((_, question),) = sends(after_a_replacement(driver), TailWanted)
    assert isinstance(question, TailWanted)
    reported = from_primary(
        driver, TailIs(question.request, 2, 6, {SHARD: 1}, Epoch(2), writers=WRITERS), 2
    )
    outcome = answered(reported)
    assert list(outcome) == ["first"]
    assert isinstance(outcome["first"], AppendOutcomeUnknownError)
    effects = from_primary(driver, entries_message([of(2, 2, 1)]), 2)
    (done,) = [e for e in effects if isinstance(e, AnswerAppends)]
    assert (done.waiters, done.first) == (["second"], 6)


def test_a_restarted_primary_whose_entries_are_the_same_changes_nothing() -> None:
    driver = joined()
    driver.order(1)
    hello = MetalogEntries(1, Epoch(1), (), committed=1)
    ((_, asked),) = sends(from_primary(driver, hello, 2), MetalogWanted)
    assert isinstance(asked, MetalogWanted)
    from_primary(driver, MetalogEntries(1, Epoch(1), (), 1, asked.request), 2)
    from_primary(driver, entries_message([of(2, 1, 1)], previous=1), 2)
    assert driver.engine.ready
    assert driver.engine.position == 2


def test_messages_of_an_earlier_incarnation_of_the_primary_are_ignored() -> None:
    driver = joined()
    from_primary(driver, entries_message([of(2, 0, 1)]), 2)
    from_primary(driver, entries_message([of(1, 1, 1)], previous=2), 1)
    driver.engine.read_tail("asker")
    ((_, question),) = sends(driver.turn(), TailWanted)
    assert isinstance(question, TailWanted)
    assert answers(from_primary(driver, TailIs(question.request, 9, 99, {}), 1)) == []
    assert driver.engine.position == 1


def test_batches_are_sent_as_before_after_joining_again() -> None:
    driver = joined()
    driver.order(1)
    driver.order(1)
    ((_, question),) = sends(after_a_replacement(driver), TailWanted)
    assert isinstance(question, TailWanted)
    driver.engine.append(b"waits", carrying(TAG), "caller")
    assert sends(driver.turn(), AppendBatch) == []
    reported = from_primary(
        driver, TailIs(question.request, 2, 6, {SHARD: 0}, Epoch(2), writers=WRITERS), 2
    )
    assert len(sends(reported, AppendBatch)) == 2


def test_index_data_of_another_entry_is_not_applied() -> None:
    driver = joined()
    driver.order(1, index_data=False)
    other = msgspec.structs.replace(driver.block(0, 0, 1), epoch=Epoch(2))
    asked = driver.hear(A, IndexData((other,), copy_of=Epoch(2)))
    assert driver.engine.tag_position == 0
    assert [e.reason for e in asked if isinstance(e, Ignore)] == [
        "index data of another metalog entry"
    ]
    driver.hear(A, IndexData((driver.block(0, 0, 1),), copy_of=Epoch(1)))
    assert driver.engine.tag_position == 1


def test_lookups_and_reads_name_the_incarnation_of_their_entries() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(1)
    from_primary(driver, entries_message([of(2, 1, 1)], previous=1), 2)
    driver.read(0, position=0)
    sent = [e.message for e in driver.turn() if isinstance(e, Send)]
    (read,) = [m for m in sent if isinstance(m, ReadRecords | IndexLookup)][:1]
    assert read.epoch == 2


def test_requests_after_joining_again_have_other_numbers_than_before() -> None:
    driver = joined()
    driver.order(1)
    driver.order(1)
    ((_, question),) = sends(after_a_replacement(driver), TailWanted)
    assert isinstance(question, TailWanted)
    from_primary(driver, TailIs(question.request, 2, 6, {SHARD: 6}, Epoch(2), writers=WRITERS), 2)
    driver.engine.read_tail("asker")
    ((_, asked),) = sends(driver.turn(), TailWanted)
    assert isinstance(asked, TailWanted)
    assert asked.request > question.request


def test_an_engine_whose_next_entries_were_freed_joins_again() -> None:
    driver = joined()
    driver.order(1)
    driver.read(9, position=9)
    base = Base().with_entries([of(1, position, 1) for position in range(5)])
    assert sends(from_primary(driver, MetalogBase(base, 1), 1), TailWanted) == []
    ((_, asked),) = sends(
        from_primary(driver, MetalogEntries(9, Epoch(1), (), committed=9), 1), MetalogWanted
    )
    assert isinstance(asked, MetalogWanted)
    effects = from_primary(driver, MetalogBase(base, asked.request), 1)
    (reported,) = answers(effects)
    assert isinstance(reported, NotReadyError)
    ((_, question),) = sends(effects, TailWanted)
    assert isinstance(question, TailWanted)
    from_primary(driver, TailIs(question.request, 9, 9, {SHARD: 9}, Epoch(1), writers=WRITERS), 1)
    assert (driver.engine.ready, driver.engine.position) == (True, 9)
