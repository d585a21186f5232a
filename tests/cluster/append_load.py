"""A process that appends without end and tells each acknowledgement on standard output, for tests
that kill it.

`python -m tests.cluster.append_load DIRECTORY NAME`: callers append `NAME-<caller>-<n>`; a line
`<seqnum> <data>` is written after the acknowledgement, so what the reader of the pipe has is
acknowledged for certain.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

import uvloop

import indilog.client
from indilog.config import MIB, Config, NodeConfig

CALLERS = 16
SEGMENT_BYTES = 8 * MIB


async def _append_for_ever(directory: str, name: str) -> None:
    config = Config(node=NodeConfig(segment_bytes=SEGMENT_BYTES))
    async with indilog.client.open(directory, config) as client:
        log = client.log("load")

        async def call(caller: int) -> None:
            for n in count():
                data = f"{name}-{caller}-{n}".encode()
                seqnum = await log.append(data, tags=[f"caller:{caller}"])
                os.write(1, b"%d %s\n" % (seqnum, data))

        await asyncio.gather(*map(call, range(CALLERS)))


if __name__ == "__main__":
    uvloop.run(_append_for_ever(sys.argv[1], sys.argv[2]))
