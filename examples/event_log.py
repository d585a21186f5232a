"""The log itself: append with tags, read by tag in order, subscribe to new records.

Prints:
    ann: created, paid
    all: created, created, paid
    live: shipped
"""

from __future__ import annotations

import asyncio
import os

import indilog


async def main() -> None:
    """Append some events and read them."""
    async with indilog.connect(os.environ.get("INDILOG_URL", "http://localhost:8080")) as client:
        events = client.log("events")
        await events.append(b"created", tags=["order:ann", "order"])
        await events.append(b"created", tags=["order:bob", "order"])
        last = await events.append(b"paid", tags=["order:ann", "order"])

        of_ann = await events.read_range("order:ann")
        print("ann:", ", ".join(record.data.decode() for record in of_ann))
        print("all:", ", ".join(record.data.decode() for record in await events.read_range()))

        await events.append(b"shipped", tags=["order:ann", "order"])
        async for record in events.subscribe("order:ann", bound=last + 1):
            print("live:", record.data.decode())
            break


if __name__ == "__main__":
    asyncio.run(main())
