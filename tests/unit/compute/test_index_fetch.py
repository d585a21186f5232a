"""Index data that an engine lacks while the metalog advances (PITFALLS 8)."""

from __future__ import annotations

from indilog.base.ids import Epoch, ViewNumber
from indilog.kernel.metalog import NewRecords
from indilog.wire.messages import IndexData, IndexDataWanted, Message, MetalogWanted
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import PRIMARY, SHARD, A, Driver, joined, sends


def entry_arrives(driver: Driver) -> list[IndexDataWanted]:
    """One more entry, 0.1 s later; return the requests."""
    driver.now += 0.1
    effects = driver.order(1, index_data=False) + driver.turn()
    return [m for to, m in sends(effects, IndexDataWanted) if to == A]  # type: ignore[misc]


def data_of(driver: Driver, start: int, end: int) -> list[IndexDataWanted]:
    """Index data arrives; each of our positions has one record."""
    blocks = tuple(driver.block(position, position, 1) for position in range(start, end))
    effects = driver.hear(A, IndexData(blocks))
    return [m for to, m in sends(effects, IndexDataWanted) if to == A]  # type: ignore[misc]


def test_lost_index_data_is_requested_while_the_metalog_advances() -> None:
    driver = joined(resend_s=0.25)
    wanted: list[IndexDataWanted] = []
    for position in range(10):
        wanted += entry_arrives(driver)
        if position > 0:
            wanted += data_of(driver, position, position + 1)
        if wanted:
            break
    assert position <= 4
    assert wanted == [IndexDataWanted(0, position + 1, 1)]
    data_of(driver, 0, 1)
    assert driver.engine.tag_position == driver.engine.position


def test_index_data_that_only_lags_is_not_requested() -> None:
    driver = joined(resend_s=0.25)
    entry_arrives(driver)
    for position in range(20):
        assert entry_arrives(driver) == []
        assert data_of(driver, position, position + 1) == []
        assert driver.engine.tag_position < driver.engine.position


def test_pushed_index_data_after_a_fetch_causes_no_request() -> None:
    """The metalog may always be ahead; otherwise each message would ask all storage nodes."""
    driver = joined(resend_s=0.25)
    for _ in range(3):
        entry_arrives(driver)
    driver.now += 1
    asked = [m for _, m in sends(driver.turn(), IndexDataWanted)]
    assert IndexDataWanted(0, 3, 1) in asked
    for _ in range(3):
        driver.order(1, index_data=False)
    assert data_of(driver, 0, 2) == [IndexDataWanted(2, 3, 1)], "a page was incomplete"
    assert data_of(driver, 2, 3) == []
    assert data_of(driver, 3, 4) == []
    assert driver.engine.tag_position < driver.engine.position


def test_a_lost_entry_is_requested_while_index_data_arrives() -> None:
    driver = joined(resend_s=0.25)
    late = NewRecords(3, ViewNumber(1), Epoch(1), {SHARD: 1})
    driver.hear(PRIMARY, entries_message((late,)))  # requests the gap; the answer is lost
    asked: list[Message] = []
    for position in range(3, 10):
        driver.now += 0.1
        data = IndexData((driver.block(position, position, 1),))
        asked += [m for _, m in sends(driver.hear(A, data), MetalogWanted)]
    assert 0 in [m.start for m in asked if isinstance(m, MetalogWanted)]
