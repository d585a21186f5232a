"""A stream of measurements: functions append to it, a reader begins at a time, a writer ends it.

Prints:
    from minute 20: 19.5, 20.0
    the stream is sealed after 4 measurements
"""

from __future__ import annotations

import asyncio
import os

import indilog
from bokistream import Streams

app = indilog.App("sensor")


@app.function
async def report(ctx: indilog.Context, minute: int, celsius: float) -> int:
    """Append a measurement. The minute is its transaction id, so readers can begin at a minute."""
    streams = Streams(ctx.log("measurements"))
    return await streams.append("kitchen", f"{celsius:.1f}".encode(), txid=minute)


async def main() -> None:
    """Deploy this file, report measurements, read some of them, and end the stream."""
    async with indilog.connect(os.environ.get("INDILOG_URL", "http://localhost:8080")) as client:
        await client.deploy(__file__)
        streams = Streams(client.log("measurements"))
        await streams.create("kitchen", age_s=86_400)
        for minute, celsius in ((0, 18.0), (10, 18.5), (20, 19.5), (30, 20.0)):
            await client.call(report, minute=minute, celsius=celsius)
        found = [record.data.decode() async for record in streams.read("kitchen", from_txid=15)]
        print("from minute 20:", ", ".join(found))
        async with streams.writer("kitchen") as writer:  # from now on, other appends are refused
            await writer.seal()
            print("the stream is sealed after", writer.next_offset, "measurements")


if __name__ == "__main__":
    asyncio.run(main())
