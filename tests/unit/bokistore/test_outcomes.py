"""After an append, no error claims that nothing was done."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bokistore import ConflictError, MismatchError, Replica, Store, Transaction
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    QuorumUnavailableError,
)
from indilog.base.log import Entry
from indilog.testing import MemoryLog
from tests.support.hooked_log import HookedLog, Read
from tests.unit.bokistore.processes import newcomer

pytestmark = pytest.mark.asyncio


class Unsteady(HookedLog):
    """A log whose first read after each append fails, if `is_shaky`."""

    def __init__(self, error: IndilogError | None = None) -> None:
        super().__init__("objects")
        self.error = error or NotReadyError("a node is away")
        self.is_shaky = self.will_fail = False

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.will_fail = self.is_shaky

    async def before_read(self, read: Read) -> None:
        if self.will_fail:
            self.will_fail = False
            raise self.error


@pytest.fixture(params=[NotReadyError("a node is away"), QuorumUnavailableError("too few")])
def log(request: pytest.FixtureRequest) -> Unsteady:
    return Unsteady(request.param)


def other(log: Unsteady) -> Store:
    """Return the store of another process, whose calls do not fail."""
    return newcomer(MemoryLog("objects", logs=log.logs))


async def test_an_operation_with_unreadable_history_has_an_unknown_outcome(log: Unsteady) -> None:
    store = Store(log)
    await store.increment("a", "n")
    log.is_shaky = True
    with pytest.raises(AppendOutcomeUnknownError, match="appended at 1") as raised:
        await store.increment("a", "n")
    assert not raised.value.retryable
    assert raised.value.__cause__ is log.error
    assert (await other(log).get("a"))["n"] == 2


async def test_a_transaction_that_cannot_be_decided_has_an_unknown_outcome(log: Unsteady) -> None:
    store = Store(log)
    log.is_shaky = True
    with pytest.raises(AppendOutcomeUnknownError) as raised:  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("a")).set("n", 1)
            await other(log).set("b", "n", 1)
    assert raised.value.__cause__ is log.error
    assert (await other(log).get("a"))["n"] == 1


async def test_a_transaction_that_was_decided_needs_no_further_read() -> None:
    class Failing(HookedLog):
        """Its reads fail from the fourth one after an append."""

        is_shaky, reads = False, 0

        async def after_append(self, entries: Sequence[Entry]) -> None:
            self.reads = 0

        async def before_read(self, read: Read) -> None:
            self.reads += 1
            if self.is_shaky and self.reads > 3:
                raise NotReadyError("a node is away")

    log = Failing("objects")
    elsewhere = newcomer(MemoryLog("objects", logs=log.logs))
    await elsewhere.set("a", "n", 1)
    async with Store(log).transaction() as txn:
        (await txn.get("a")).set("n", 2)
        await elsewhere._replay.checkpoint("a", (await elsewhere.get("a")).view)
        log.is_shaky = True
    assert txn.seqnum is not None
    assert (await elsewhere.get("a"))["n"] == 2


async def test_a_transaction_with_an_id_resolves_an_unknown_outcome_itself(log: Unsteady) -> None:
    store = Store(log)
    log.is_shaky = True

    async def body(txn: Transaction) -> int:
        (await txn.get("a")).increment("n")
        await other(log).increment("b", "n")
        return 7

    assert await store.transact(body, id="x") == 7
    assert (await other(log).get("a"))["n"] == 1


async def test_no_retryable_error_follows_an_attempt_that_may_have_taken_effect() -> None:
    class Lost(HookedLog):
        """The answer to the first append is lost, and then nothing can be read."""

        is_away = False

        async def after_append(self, entries: Sequence[Entry]) -> None:
            self.is_away = True
            raise AppendOutcomeUnknownError("lost")

        async def before_read(self, read: Read) -> None:
            if self.is_away:
                raise NotReadyError("a node is away")

    log = Lost("objects")

    async def body(txn: Transaction) -> None:
        (await txn.get("a")).increment("n")

    with pytest.raises(AppendOutcomeUnknownError, match="'x' may have taken effect") as raised:
        await Store(log).transact(body, id="x")
    assert isinstance(raised.value.__cause__, NotReadyError)
    elsewhere = newcomer(MemoryLog("objects", logs=log.logs))
    await elsewhere.transact(body, id="x")
    assert (await elsewhere.get("a"))["n"] == 1


async def test_an_error_decided_by_the_order_of_the_log_is_unchanged(log: Unsteady) -> None:
    store = Store(log)
    await store.set("a", "n", "text")
    with pytest.raises(MismatchError):
        await store.increment("a", "n")
    with pytest.raises(ConflictError) as raised:  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("a")).set("n", 1)
            await other(log).set("a", "n", 2)
    assert raised.value.retryable


async def test_an_error_before_the_append_is_retryable(log: Unsteady) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    log.will_fail = True
    with pytest.raises(type(log.error)) as raised:
        async with store.transaction() as txn:
            (await txn.get("a")).set("n", 2)
    assert raised.value.retryable
    assert await log.tail() == 1


async def test_a_command_with_an_unreadable_result_has_an_unknown_outcome(log: Unsteady) -> None:
    applied: list[bytes] = []
    replica = Replica(log, applied.append, snapshot=bytes, restore=lambda _: None)
    log.is_shaky = True
    with pytest.raises(AppendOutcomeUnknownError) as raised:
        await replica.propose(b"once")
    assert raised.value.__cause__ is log.error
    await replica.sync()
    assert applied == [b"once"]


async def test_a_retryable_error_that_a_command_raised_is_its_result(log: Unsteady) -> None:
    def refuse(_: bytes) -> None:
        raise log.error

    replica = Replica(log, refuse, snapshot=bytes, restore=lambda _: None)
    with pytest.raises(type(log.error)):
        await replica.propose(b"refused")
