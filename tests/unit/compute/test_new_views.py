"""What a compute node does when an entry installs a view (decision 0049)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import Config
from indilog.kernel.metalog import NO_INCARNATION, Base, NewRecords, NewView, NewWriters
from indilog.kernel.placement import Placement
from indilog.kernel.records import RecordBatch
from indilog.kernel.view import NO_WRITER, ShardPlacement, View, view_of, view_with
from indilog.roles.role import AnswerAppends, Effect, Received, Started
from indilog.wire.base_messages import MetalogBase
from indilog.wire.messages import (
    AppendBatch,
    IndexLookup,
    Message,
    MetalogWanted,
    ShardWanted,
    TailIs,
    TailWanted,
)
from indilog_compute.engine import Engine
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import (
    ENGINE,
    LOG,
    PRIMARY,
    SHARD,
    TAG,
    Driver,
    answers,
    carrying,
    joined,
    sends,
)


def install(driver: Driver, view: View) -> list[Effect]:
    entry = NewView(driver.position, ViewNumber(1), Epoch(1), view)
    driver.position += 1
    return driver.hear(PRIMARY, entries_message((entry,)))


def without_shard(view: View) -> View:
    placed = view.shards[SHARD]
    shards = view.shards | {SHARD: ShardPlacement(placed.replicas, NO_WRITER)}
    return msgspec.structs.replace(view, number=ViewNumber(view.number + 1), shards=shards)


def with_index_shards(view: View, count: int, position: int) -> View:
    members = msgspec.structs.replace(
        view.members, index_shards=view_of(index_shards=count).index_shards, version=1
    )
    return view_with(view, members, position, Placement(view).replicas, lambda _: NO_INCARNATION)


def test_a_node_whose_shard_is_taken_away_appends_nothing_more() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    driver.turn()
    effects = install(driver, without_shard(driver.engine.placement.view))
    (outcome,) = answers(effects)
    assert isinstance(outcome, AppendOutcomeUnknownError)
    with pytest.raises(NotReadyError, match="no shard"):
        driver.engine.append(b"two", carrying(LOG, TAG), "waiter")


def test_a_node_asks_for_its_shard_when_a_view_gives_it_one() -> None:
    given = Driver().engine.placement.view
    engine = Engine(ENGINE, [without_shard(given)], Config())
    ((_, wanted),) = sends(engine.handle([Started(Epoch(1))], Instant(0.0)), TailWanted)
    assert isinstance(wanted, TailWanted)
    view = msgspec.structs.replace(given, number=ViewNumber(9))
    known = TailIs(wanted.request, 0, 0, {}, Epoch(1), view=view)
    effects = engine.handle([Received(PRIMARY, known, Epoch(1))], Instant(0.0))
    assert sends(effects, ShardWanted) == [(PRIMARY, ShardWanted(SHARD, Epoch(1)))]
    assert not engine.ready, "it cannot append yet"


def test_a_shard_that_comes_back_waits_for_the_next_incarnation() -> None:
    """A second writer of one incarnation could not be distinguished from the first."""
    driver = joined()
    given = driver.engine.placement.view
    install(driver, without_shard(given))
    again = msgspec.structs.replace(given, number=ViewNumber(given.number + 2))
    assert sends(install(driver, again), ShardWanted) == []
    assert sends(driver.turn(), AppendBatch) == []


def test_a_lookup_names_the_view_and_asks_all_its_index_shards() -> None:
    driver = joined(tag_cache_seqnums_max=0, suffix_cuts_max=0, popularity_entries_max=0)
    driver.order(1)
    view = with_index_shards(driver.engine.placement.view, 3, driver.position)
    install(driver, view)
    driver.engine.read(1, TAG, 0, 0, "reader")  # type: ignore[arg-type]
    asked = sends(driver.turn(), IndexLookup)
    assert [to for to, _ in asked] == [f"index-{shard}-0" for shard in range(3)]
    lookup = asked[0][1]
    assert isinstance(lookup, IndexLookup)
    assert (lookup.view, lookup.index_shards) == (view.number, 3)


def test_a_node_that_started_with_an_older_view_asks_for_the_shard_of_the_newest() -> None:
    """It has not written the shard of the older one."""
    given = Driver().engine.placement.view
    placed = given.shards[SHARD]
    other = ShardId(7)
    engine = Engine(ENGINE, [given], Config())
    ((_, wanted),) = sends(engine.handle([Started(Epoch(1))], Instant(0.0)), TailWanted)
    assert isinstance(wanted, TailWanted)
    shards = given.shards | {SHARD: ShardPlacement(placed.replicas, NO_WRITER), other: placed}
    view = msgspec.structs.replace(given, number=ViewNumber(9), shards=shards)
    known = TailIs(wanted.request, 0, 0, {}, Epoch(1), view=view)
    effects = engine.handle([Received(PRIMARY, known, Epoch(1))], Instant(0.0))
    assert ShardWanted(other, Epoch(1)) in [message for _, message in sends(effects, ShardWanted)]


NEW_SHARD = ShardId(5)


def batches(sent: Sequence[tuple[NodeId, Message]]) -> list[RecordBatch]:
    return [RecordBatch(message.batch) for _, message in sent if isinstance(message, AppendBatch)]


def finalized(view: View) -> View:
    placed = view.shards[SHARD]
    ended = ShardPlacement(placed.replicas, NO_WRITER, Epoch(1), finalized=True)
    shards = view.shards | {SHARD: ended, NEW_SHARD: placed}
    return msgspec.structs.replace(view, number=ViewNumber(view.number + 1), shards=shards)


def test_a_node_whose_shard_is_finalized_continues_on_the_new_one() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "one")
    driver.turn()
    effects = install(driver, finalized(driver.engine.placement.view))
    assert answers(effects) == []
    assert sends(effects, ShardWanted) == [(PRIMARY, ShardWanted(NEW_SHARD, Epoch(1)))]
    entry = NewWriters(driver.position, ViewNumber(2), Epoch(1), {NEW_SHARD: Epoch(1)})
    driver.position += 1
    sent = sends(driver.hear(PRIMARY, entries_message((entry,))), AppendBatch)
    assert {batch.header.shard for batch in batches(sent)} == {NEW_SHARD}
    driver.engine.append(b"two", carrying(LOG, TAG), "two")
    cut = NewRecords(driver.position, ViewNumber(2), Epoch(1), {NEW_SHARD: 1})
    driver.position += 1
    (done,) = [
        e for e in driver.hear(PRIMARY, entries_message((cut,))) if isinstance(e, AnswerAppends)
    ]
    assert (done.waiters, done.first) == (["one"], driver.tail)


def test_what_is_ordered_below_the_entry_that_ends_the_shard_is_not_sent_again() -> None:
    """Also if one message has both entries."""
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "one")
    driver.turn()
    view = finalized(driver.engine.placement.view)
    at = driver.position
    cut = NewRecords(at, ViewNumber(1), Epoch(1), {SHARD: 1})
    ends = NewView(at + 1, ViewNumber(2), Epoch(1), view)
    owns = NewWriters(at + 2, ViewNumber(2), Epoch(1), {NEW_SHARD: Epoch(1)})
    driver.position += 3
    effects = driver.hear(PRIMARY, entries_message((cut, ends, owns)))
    assert [e.waiters for e in effects if isinstance(e, AnswerAppends)] == [["one"]]
    assert sends(effects, AppendBatch) == []


def test_a_node_that_joins_again_after_its_shard_was_finalized_resends_what_is_not_ordered() -> (
    None
):
    driver = joined()
    for data in (b"one", b"two"):
        driver.engine.append(data, carrying(LOG, TAG), data)
        driver.turn()
    later = NewRecords(9, ViewNumber(1), Epoch(1), {SHARD: 1})
    ((_, asked),) = sends(driver.hear(PRIMARY, entries_message((later,))), MetalogWanted)
    assert isinstance(asked, MetalogWanted)
    base = Base(9, Epoch(1), 1, {SHARD: 1}, writers={SHARD: Epoch(1)})
    effects = driver.hear(PRIMARY, MetalogBase(base, asked.request))
    ((_, wanted),) = sends(effects, TailWanted)
    assert isinstance(wanted, TailWanted)
    view = finalized(driver.engine.placement.view)
    writers = {SHARD: Epoch(1), NEW_SHARD: Epoch(1)}
    tail = TailIs(wanted.request, 9, 1, {SHARD: 1}, Epoch(1), writers=writers, view=view)
    effects = driver.hear(PRIMARY, tail)
    (outcome,) = answers(effects)
    assert isinstance(outcome, AppendOutcomeUnknownError)
    assert "the record is in the log" in str(outcome)
    assert {
        (b.header.shard, b.header.first, b.record(0).data)
        for b in batches(sends(effects, AppendBatch))
    } == {(NEW_SHARD, 0, b"two")}


def test_a_writer_that_lost_its_shard_does_not_continue_on_the_new_one() -> None:
    """A later incarnation of the node has it."""
    driver = joined()
    entry = NewWriters(driver.position, ViewNumber(1), Epoch(1), {SHARD: Epoch(2)})
    driver.position += 1
    driver.hear(PRIMARY, entries_message((entry,)))
    assert sends(install(driver, finalized(driver.engine.placement.view)), ShardWanted) == []
    with pytest.raises(NotReadyError, match="no shard"):
        driver.engine.append(b"two", carrying(LOG, TAG), "waiter")
