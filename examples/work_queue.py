"""A queue, and a service in every worker that processes its messages.

Prints:
    resized: ant.png, bee.png, cat.png
"""

from __future__ import annotations

import asyncio
import os

import indilog
from bokiqueue import Queue

app = indilog.App("work-queue")


@app.function
async def upload(ctx: indilog.Context, name: str) -> None:
    """Take a picture; it is resized later."""
    await Queue(ctx.log("pictures"), "resize", shards=1).push(name.encode())


@app.service
async def resize(ctx: indilog.Context) -> None:
    """Resize one picture after another. If this service raises or crashes, the message is delivered
    again.
    """
    queue = Queue(ctx.log("pictures"), "resize", shards=1)
    while True:
        async with queue.pop(wait=5, lease=30) as message:
            if message is not None:
                await ctx.log("resized").append(message.data)


async def main() -> None:
    """Deploy this file, upload pictures, and wait for them."""
    async with indilog.connect(os.environ.get("INDILOG_URL", "http://localhost:8080")) as client:
        await client.deploy(__file__)
        for name in ("ant.png", "bee.png", "cat.png"):
            await client.call(upload, name=name)
        done: set[str] = set()
        async for record in client.log("resized").subscribe():
            done.add(record.data.decode())
            if len(done) == 3:
                break
        print("resized:", ", ".join(sorted(done)))


if __name__ == "__main__":
    asyncio.run(main())
