"""The application of `bench.store`: a transfer between two accounts, and reads of an object."""

from __future__ import annotations

import asyncio

import indilog
from bokistore import Store, Transaction

app = indilog.App("bench")

RETRIES = 100
"""Retries of a transfer in conflict: the benchmark counts committed transfers."""


async def transferred(store: Store, one: str, other: str) -> int:
    """Move 1 from an account to another, by reading and writing both; return how many attempts
    that took.
    """
    attempts = 0

    async def body(txn: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        here, there = await asyncio.gather(txn.get(one), txn.get(other))
        here.set("balance", here.get("balance", 0) - 1)
        there.set("balance", there.get("balance", 0) + 1)

    await store.transact(body, retries=RETRIES)
    return attempts


async def aged(store: Store, name: str, operations: int) -> None:
    """Give an object a history of `operations` operations."""
    for _ in range(0, operations, 10):
        await asyncio.gather(*[store.increment(name, "n") for _ in range(10)])


@app.function
async def transfer(ctx: indilog.Context, one: str, other: str) -> int:
    """Move 1 between two accounts in a serializable transaction; return the attempts."""
    return await transferred(Store(ctx.log("bench")), one, other)


@app.function
async def age(ctx: indilog.Context, name: str, operations: int) -> None:
    """Give an object a history of `operations` operations."""
    await aged(Store(ctx.log("bench")), name, operations)


@app.function
async def read(ctx: indilog.Context, name: str) -> int:
    """Return the number in an object."""
    number: int = (await Store(ctx.log("bench")).get(name))["n"]
    return number
