"""A client process of `bench.peers`: opens one side, then runs the requested measurements.

It reads one JSON object per line: first `{"side", "address", "client", "callers"}`, then for each
measurement `{"operation", "seconds"}`, which it answers with one line. It ends at the end of its
input.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import uvloop

from bench.sides.side import Peer
from bench.support.harness import closed_loop

Opened: TypeAlias = Callable[[dict[str, Any], int, int], AbstractAsyncContextManager[Peer]]

SIDES: Final[dict[str, tuple[str, str]]] = {
    "redis-py": ("bench.sides.redis", "redis_py"),
    "redis-py, Unix socket": ("bench.sides.redis", "redis_py_tuned"),
    "valkey-glide": ("bench.sides.redis", "glide"),
    "NATS JetStream": ("bench.sides.nats", "jetstream"),
    "PostgreSQL": ("bench.sides.postgres", "postgres"),
    "etcd": ("bench.sides.etcd", "etcd"),
    "indilog, embedded": ("bench.sides.indilog", "embedded"),
    "indilog, compute node": ("bench.sides.indilog", "compute_node"),
    "indilog, one of 3 nodes": ("bench.sides.indilog", "one_of_three"),
    "indilog, connect": ("bench.sides.indilog", "connected"),
}
"""By side, the module and function that open it. A client process imports only its own side."""


def opener_of(side: str) -> Opened:
    """Return the function that opens a side."""
    module, function = SIDES[side]
    opened: Opened = getattr(importlib.import_module(module), function)
    return opened


async def serve() -> None:
    """Execute the requests of the input until its end."""
    lines = asyncio.get_running_loop()
    first = json.loads(await lines.run_in_executor(None, sys.stdin.readline))
    callers = first["callers"]
    async with opener_of(first["side"])(first["address"], first["client"], callers) as peer:
        await peer.prepare(callers)
        _say({"lacks": sorted(peer.lacks)})
        while line := await lines.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            _say(await measure(peer, asked["operation"], callers, asked["seconds"]))


async def measure(peer: Peer, operation: str, callers: int, seconds: float) -> dict[str, Any]:
    """Measure one operation, after a short warm-up that does not count."""
    one = getattr(peer, operation)
    await closed_loop(one, callers=callers, seconds=min(0.2, seconds / 4))
    gc.collect()
    found = await closed_loop(one, callers=callers, seconds=seconds)
    return {
        "seconds": found.seconds,
        "cpu_s": found.cpu_s,
        "latencies": b64encode(found.latencies_s.tobytes()).decode(),
    }


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve())
