"""Transactions with an id take effect once, in any process and however often they run."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from bokistore import AlreadyCommittedError, ConflictError, InvalidObjectError, Store, Transaction
from bokistore.records import id_tag_of
from bokistore.replay import ObjectReplay
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.ids import SeqNum, UserTag
from indilog.testing import MemoryLog, MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.bokistore.processes import newcomer


async def increment(txn: Transaction) -> int:
    """Add 1 by reading and setting; the result is the new number."""
    obj = await txn.get("a")
    number: int = obj.get("n", 0) + 1
    obj.set("n", number)
    return number


@pytest.mark.asyncio
async def test_a_repeated_id_has_no_effect_and_returns_the_first_result(log: MemoryLog) -> None:
    store = Store(log)
    assert await store.transact(increment, id="run-1/3") == 1
    await store.increment("a", "n", 10)
    tail = await log.tail()
    for reader in (store, newcomer(log)):
        assert await reader.transact(increment, id="run-1/3") == 1
        assert (await reader.get("a"))["n"] == 11
    assert await log.tail() == tail, "a later one appends nothing"
    assert await store.transact(increment, id="run-1/4") == 12


@pytest.mark.asyncio
async def test_the_body_does_not_run_after_an_earlier_commit(log: MemoryLog) -> None:
    store = Store(log)

    async def withdraw(txn: Transaction) -> str:
        account = await txn.get("account")
        if account["balance"] < 5:
            raise ValueError("not enough")
        account.increment("balance", -5)
        return "paid"

    await store.set("account", "balance", 5)
    assert await store.transact(withdraw, id="pay") == "paid"
    assert await newcomer(log).transact(withdraw, id="pay") == "paid"


@pytest.mark.asyncio
async def test_a_block_with_an_id_that_committed_is_refused_on_entering(log: MemoryLog) -> None:
    store = Store(log)
    async with store.transaction(id="x") as txn:
        txn.increment("a", "n")
        txn.result = {"by": "first"}
    with pytest.raises(AlreadyCommittedError, match="'x' has already committed, at 0") as refused:
        async with newcomer(log).transaction(id="x"):
            pytest.fail("the body does not run")
    error = refused.value
    assert (error.id, error.seqnum, error.result) == ("x", txn.seqnum, {"by": "first"})
    assert not error.retryable


@pytest.mark.asyncio
async def test_a_block_with_an_id_that_committed_is_refused_on_leaving(log: MemoryLog) -> None:
    store = Store(log)
    with pytest.raises(AlreadyCommittedError):  # noqa: PT012
        async with store.transaction(id="x") as late:
            late.increment("a", "n")
            async with store.transaction(id="x") as early:
                early.increment("a", "n")
    assert (late.seqnum, early.seqnum) == (None, 0)
    log.logs.drop_aux()
    assert (await newcomer(log).get("a"))["n"] == 1


@pytest.mark.asyncio
async def test_an_aborted_attempt_does_not_use_up_the_id(log: MemoryLog) -> None:
    store = Store(log)
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction(id="x") as txn:
            await txn.get("a")
            txn.set("b", "n", 1)
            await store.set("a", "n", 1)
    assert await store.transact(increment, id="x") == 2


@pytest.mark.asyncio
async def test_a_transaction_without_writes_records_its_result_too(log: MemoryLog) -> None:
    store = Store(log)

    async def read(txn: Transaction) -> int:
        number: int = (await txn.get("a")).get("n", 0)
        return number

    assert await store.transact(read, id="x") == 0
    await store.set("a", "n", 7)
    assert await store.transact(read, id="x") == 0
    assert await store.transact(read) == 7


@pytest.mark.asyncio
async def test_the_record_is_found_by_its_id(log: MemoryLog) -> None:
    await Store(log).transact(increment, id="x")
    (record,) = await log.read_range(id_tag_of("x"))
    assert set(record.tags) == {"store:a", id_tag_of("x")}
    assert json.loads(record.data) == {
        "store": 3, "writes": {"a": [["set", ["n"], 1]]}, "reads": ["a"],
        "ids": {"x": 1}, "horizon": 0,
    }  # fmt: skip


@pytest.mark.asyncio
async def test_a_foreign_record_under_an_ids_tag_does_not_use_up_the_id(log: MemoryLog) -> None:
    for data in (
        b"not JSON",
        b'{"store":2,"writes":{"a":[["delete",[]]]}}',
        b'{"store":2,"writes":{},"ids":{"y":1}}',
        b'{"store":2,"writes":{},"ids":{"":1}}',
    ):
        await log.append(data, tags=[id_tag_of("x")])
    assert await Store(log).transact(increment, id="x") == 1


@pytest.mark.asyncio
async def test_a_bad_id_or_result_is_refused_and_nothing_is_appended(log: MemoryLog) -> None:
    store = Store(log)
    for bad in ("", "x\x1fy", "x" * 253, 7):
        with pytest.raises(InvalidObjectError, match="id"):
            await store.transact(increment, id=bad)  # type: ignore[arg-type]

    async def body(txn: Transaction) -> object:
        txn.increment("a", "n")
        return object()

    with pytest.raises(InvalidObjectError, match="JSON"):
        await store.transact(body, id="x")
    assert await log.tail() == 0


@pytest.mark.asyncio
async def test_results_have_their_json_form_also_the_first_time(log: MemoryLog) -> None:
    async def body(txn: Transaction) -> tuple[int, ...]:
        txn.increment("a", "n")
        return (1, 2)

    result: object = await Store(log).transact(body, id="x")
    assert result == [1, 2]
    assert await Store(log).transact(body) == (1, 2)


@pytest.mark.asyncio
async def test_a_committed_inner_block_does_not_count_as_the_outer_one() -> None:
    outer, inner = Store(MemoryLog("outer")), Store(MemoryLog("inner"))
    await inner.transact(increment, id="x")

    async def body(txn: Transaction) -> None:
        txn.increment("a", "n")
        async with inner.transaction(id="x"):
            pass

    with pytest.raises(AlreadyCommittedError):
        await outer.transact(body, id="x")
    assert not await outer.get("a")


@pytest.mark.asyncio
async def test_an_append_with_unknown_outcome_is_retried_and_counts_once(log: MemoryLog) -> None:
    class ForgetfulLog(MemoryLog):
        """Appends, and then raises an unknown outcome."""

        is_forgetful = True

        async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
            seqnum = await super().append(data, tags=tags)
            if self.is_forgetful:
                self.is_forgetful = False
                raise AppendOutcomeUnknownError
            return seqnum

    forgetful = ForgetfulLog("objects", logs=log.logs)
    assert await Store(forgetful).transact(increment, id="x") == 1
    assert (await newcomer(log).get("a"))["n"] == 1
    forgetful.is_forgetful = True
    with pytest.raises(AppendOutcomeUnknownError):
        await Store(forgetful).transact(increment)


def twice(choose: Choose) -> tuple[int | None, ...]:
    """Run one transaction by two executions; return their results and the object's value."""
    log = MemoryLog("objects", logs=MemoryLogs())
    run_stepped([newcomer(log).increment("a", "n", 10)], lambda ready: ready[0])
    results = run_stepped(
        [newcomer(SteppedLog(log)).transact(increment, id="x") for _ in "ab"], choose
    )
    (final,) = run_stepped([newcomer(log).get("a")], lambda ready: ready[0])
    return (*results, final["n"])


def test_two_executions_count_once_in_every_interleaving() -> None:
    assert set(interleavings(twice)) == {(11, 11, 11)}


def test_the_check_detects_a_store_that_does_not_validate_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing_done(*_: object) -> None:
        return None

    monkeypatch.setattr(ObjectReplay, "find_committed", nothing_done)
    monkeypatch.setattr("bokistore.records._id_tag", lambda _: "nowhere")
    assert set(interleavings(twice)) - {(11, 11, 11)}
