"""State that survives restarts: objects, and a transaction over two of them.

Prints:
    likes of the page: 3
    ann has 20, bob has 80
    refused: ann has only 20
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import indilog
from bokistore import Store, Transaction

app = indilog.App("counter")


@dataclass
class Account:
    """An account, as an object of the store."""

    balance: int


@app.function
async def like(ctx: indilog.Context, page: str) -> int:
    """Count a like; return how many there are now."""
    before = await Store(ctx.log("likes")).increment(page, "likes")
    return int(before or 0) + 1


@app.function
async def transfer(ctx: indilog.Context, source: str, target: str, amount: int) -> str:
    """Move an amount from one account to another, or say why not. An account begins with 50."""

    async def move(txn: Transaction) -> str:
        payer, payee = await txn.get(source), await txn.get(target)
        has = payer.to(Account).balance if payer else 50
        if has < amount:
            return f"refused: {source} has only {has}"
        had = payee.to(Account).balance if payee else 50
        payer.set("balance", has - amount)
        payee.set("balance", had + amount)
        return f"{source} has {has - amount}, {target} has {had + amount}"

    return await Store(ctx.log("accounts")).transact(move)  # retried after a conflict


async def main() -> None:
    """Deploy this file and call its functions."""
    async with indilog.connect(os.environ.get("INDILOG_URL", "http://localhost:8080")) as client:
        await client.deploy(__file__)
        for _ in range(2):
            await client.call(like, page="home")
        print("likes of the page:", await client.call(like, page="home"))
        print(await client.call(transfer, source="ann", target="bob", amount=30))
        print(await client.call(transfer, source="ann", target="bob", amount=80))


if __name__ == "__main__":
    asyncio.run(main())
