"""A process that appends without end and prints each acknowledgement, for tests
that kill it.

`python -m tests.cluster.append_load DIRECTORY NAME CALLERS`: callers append `NAME-<caller>-<n>` and
padding. A line `<seqnum> <NAME-caller-n>` is written after the acknowledgement, so every record
whose line was read is acknowledged. Segments are so small that they fill in a second.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

import uvloop

import indilog.client
from indilog.config import KIB, ClusterConfig, Config, node_config

CALLERS = 32
CONFIG = Config(
    cluster=ClusterConfig(record_bytes_max=64 * KIB, batch_bytes_max=128 * KIB),
    node=node_config(segment_bytes=256 * KIB),
)
_PADDING = b" " * 200


async def _append_for_ever(directory: str, name: str, callers: int) -> None:
    async with indilog.client.open(directory, CONFIG) as client:
        log = client.log("load")

        async def call(caller: int) -> None:
            for n in count():
                data = f"{name}-{caller}-{n}".encode()
                seqnum = await log.append(data + _PADDING, tags=[f"caller:{caller}"])
                os.write(1, b"%d %s\n" % (seqnum, data))

        await asyncio.gather(*map(call, range(callers)))


if __name__ == "__main__":
    uvloop.run(_append_for_ever(sys.argv[1], sys.argv[2], int(sys.argv[3])))
