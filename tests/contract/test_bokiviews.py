"""Views on every kind of log: processes agree, read what was acknowledged, and start from
checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bokiviews import replica
from bokiviews.transaction import Transaction
from indilog.base.errors import TrimmedError
from indilog.base.log import Log
from tests.unit.bokiviews.groups import process

pytestmark = pytest.mark.asyncio

PROCESSES = 3
TRANSFERS = 10


async def test_transactions_of_several_processes_lose_no_update(
    session_of: Callable[[], Log],
) -> None:
    started = [process(session_of()) for _ in range(PROCESSES)]

    async def transfer(number: int) -> None:
        views = started[number]
        accounts, count = await views.map("accounts", int), await views.counter("count")

        async def body(txn: Transaction) -> None:
            txn[accounts]["a"] = txn[accounts].get("a", 0) - 1
            txn[accounts]["b"] = txn[accounts].get("b", 0) + 1
            txn[count].add(1)

        for _ in range(TRANSFERS):
            await views.transact(body)

    await asyncio.gather(*map(transfer, range(PROCESSES)))
    total = PROCESSES * TRANSFERS
    for views in (*started, process(session_of())):
        accounts = await views.map("accounts", int)
        assert await accounts.get_many(["a", "b"]) == {"a": -total, "b": total}
        assert await (await views.counter("count")).value() == total


async def test_a_read_sees_what_another_session_has_acknowledged(
    session_of: Callable[[], Log],
) -> None:
    one, two = [await process(session_of()).counter("c") for _ in range(2)]
    for number in range(1, 30):
        assert await one.add(1) == number
        assert await two.value() == number


async def test_a_new_process_starts_from_a_checkpoint(
    session_of: Callable[[], Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CHECKPOINT_EVERY", 4)
    items = await process(session_of()).list("items", int)
    for number in range(20):
        await items.append(number)
    late, log = process(session_of()), session_of()
    assert await (await late.list("items", int)).items() == list(range(20))
    with pytest.raises(TrimmedError):
        await log.read_range("views:views:changes", 0, fresh=True)
