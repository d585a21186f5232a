"""A program that appends records and moves them to cold storage; `test_kill_cold` kills it.

It prints a line for each acknowledged record: its seqnum and its data.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from indilog.base.log import Entry
from indilog.runtime.cluster.assembly import embedded
from tests.support.cold_storage import configured

BATCH = 20
RECORD_BYTES = 4000


async def load(directory: Path, name: str) -> None:
    """Append until killed."""
    async with embedded(configured(directory)) as platform:
        log = platform.logs.log("load")
        number = 0
        while True:
            data = [f"{name}-{number + n}".encode() for n in range(BATCH)]
            entries = [Entry(d.ljust(RECORD_BYTES, b"."), tags=["load"]) for d in data]
            for seqnum, one in zip(await log.append_batch(entries), data, strict=True):
                print(seqnum, one.decode(), flush=True)  # noqa: T201 the test reads it
            number += BATCH


if __name__ == "__main__":
    uvloop.run(load(Path(sys.argv[1]), sys.argv[2]))
