"""The benchmark of BokiStore measures what it reports, on a log in memory."""

from __future__ import annotations

import asyncio

import pytest

from bench.store import PAST, Transfers, sides_cold, sides_in_process
from bench.store_app import aged
from bokistore import Store
from indilog.testing import MemoryLog


@pytest.mark.asyncio
async def test_transfers_keep_the_sum_and_count_their_attempts() -> None:
    log, transfers = MemoryLog("bench"), Transfers(accounts=3)
    sides = sides_in_process(log, transfers)
    await asyncio.gather(*[sides["transfer"](caller) for caller in range(20)])
    accounts = await Store(log).multi_get([f"account:{number}" for number in range(3)])
    assert sum(account.get("balance", 0) for account in accounts.values()) == 0
    assert transfers.done == 20
    assert transfers.per_commit >= 1


@pytest.mark.asyncio
async def test_both_histories_are_read_hot_and_cold() -> None:
    log = MemoryLog("bench")
    for past, operations in PAST.items():
        await aged(Store(log), f"aged:{past}", min(operations, 200))
    for sides in (sides_in_process(log, Transfers(3)), sides_cold(log)):
        read = [await side(0) for name, side in sides.items() if name.startswith("get")]
        assert [obj["n"] for obj in read] == [10, 200]  # type: ignore[index]
