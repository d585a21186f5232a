"""A workflow: each step is decided once, and is compensated if a later step fails.

Prints:
    tea: charged 12, sent
    elephant: failed, charged 0
    the same id again: charged 12, sent
"""

from __future__ import annotations

import asyncio
import os

import indilog
from bokiflow import Flow, RunFailedError, Workflow
from bokistore import Store

app = indilog.App("order")
flow = Flow(app)


class CannotBeSentError(Exception):
    """No parcel is large enough."""


@flow.workflow
async def buy(wf: Workflow, item: str) -> str:
    """Charge for an item and send it."""
    accounts = Store(wf.log("accounts"))

    async def charge() -> int:
        await accounts.increment(item, "charged", 12)
        return 12

    async def refund(charged: int) -> None:
        await accounts.increment(item, "charged", -charged)

    async def send() -> str:
        if item == "elephant":
            raise CannotBeSentError(item)
        return "sent"

    charged = await wf.step(charge, compensate=refund)
    return f"charged {charged}, {await wf.step(send, retries=0)}"


@app.function
async def place(ctx: indilog.Context, item: str) -> str:
    """Buy an item; placing an order for the same item again returns the first order's result."""
    run = await buy.start(item, id=f"order-{item}")
    try:
        return await run.result(timeout=30)
    except RunFailedError:
        left = await Store(ctx.log("accounts")).get(item)
        return f"failed, charged {left['charged']}"


async def main() -> None:
    """Deploy this file and place orders."""
    async with indilog.connect(os.environ.get("INDILOG_URL", "http://localhost:8080")) as client:
        await client.deploy(__file__)
        print("tea:", await client.call(place, item="tea"))
        print("elephant:", await client.call(place, item="elephant"))
        print("the same id again:", await client.call(place, item="tea"))


if __name__ == "__main__":
    asyncio.run(main())
