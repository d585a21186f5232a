"""A client process of `bench.peers`: opens one side, then measures what it is told to.

It reads one JSON object a line: first `{"side", "address", "client", "callers"}`, then for each
measurement `{"operation", "seconds"}`, upon which it answers with one line. It ends with its input.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import uvloop

from bench import peer_etcd, peer_indilog, peer_nats, peer_postgres, peer_redis
from bench.harness import closed_loop
from bench.peer import Peer

Opened: TypeAlias = Callable[[dict[str, Any], int, int], AbstractAsyncContextManager[Peer]]

SIDES: Final[dict[str, Opened]] = {
    "redis-py": peer_redis.redis_py,
    "redis-py, Unix socket": peer_redis.redis_py_tuned,
    "valkey-glide": peer_redis.glide,
    "NATS JetStream": peer_nats.jetstream,
    "PostgreSQL": peer_postgres.postgres,
    "etcd": peer_etcd.etcd,
    "indilog, embedded": peer_indilog.embedded,
    "indilog, compute node": peer_indilog.compute_node,
    "indilog, connect": peer_indilog.connected,
}


async def serve() -> None:
    """Do what the input says, to its end."""
    lines = asyncio.get_running_loop()
    first = json.loads(await lines.run_in_executor(None, sys.stdin.readline))
    callers = first["callers"]
    async with SIDES[first["side"]](first["address"], first["client"], callers) as peer:
        await peer.prepare(callers)
        _say({"lacks": sorted(peer.lacks)})
        while line := await lines.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            _say(await measured(peer, asked["operation"], callers, asked["seconds"]))


async def measured(peer: Peer, operation: str, callers: int, seconds: float) -> dict[str, Any]:
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
