"""IndiLog beside Redis Streams, in the same run, driven from the same Python process (WORKLOADS 2).

Redis runs with `appendfsync always` and one stream a tag: XADD appends, XRANGE ... COUNT 1 is
`read_next`, XREVRANGE ... COUNT 1 is `read_prev`. Three clients: redis-py's asyncio client with
hiredis as its documentation sets it up (TCP, a pool of connections), which the ratios are to; the
same with the fastest settings that were found (a Unix socket, one connection a caller); and
valkey-glide, which pipelines all callers over one TCP connection. Every side runs its callers as
tasks of one uvloop.

IndiLog runs embedded in this process, R = 1; with `--processes`, its tiers run as separate
processes (3 sequencers, R = 1), and this process is the compute node.

    python -m bench.peers [--seconds 1] [--rounds 5] [--callers 1 64 256] [--processes]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import cycle
from typing import Protocol

import redis.asyncio as redis
from glide import (
    GlideClient,
    GlideClientConfiguration,
    IdBound,
    MaxId,
    MinId,
    NodeAddress,
)

from bench import platforms
from bench.harness import (
    Operation,
    Report,
    Round,
    Rounds,
    arguments,
    interleaved,
    latency,
    median_of,
    ratio_of,
    run,
    table_of,
)
from bench.redis_server import RedisServer, redis_server
from indilog.log import Log

RECORD_BYTES = 1024
TAGS = [f"tag-{number}" for number in range(20)]
READ_BACK = 2000
"""Records that the reads choose from."""
SEED = 1
BASE = "redis-py"
TUNED = "redis-py, Unix socket"
OPERATIONS = ("append", "read_next", "read_prev", "mixed")


class Peer(Protocol):
    """One side of the comparison; `caller` is the number of the closed-loop caller."""

    async def prepare(self) -> None:
        """Append what the reads will find."""

    def append(self, caller: int) -> Awaitable[object]:
        """Append a record of 1 KiB with one of the tags; durable on return."""

    async def read_next(self, caller: int) -> object:
        """Read the first record with a tag from a place on."""

    async def read_prev(self, caller: int) -> object:
        """Read the last record with a tag up to a place."""

    async def mixed(self, caller: int) -> object:
        """Append, and at the next call read."""


class _Sequence:
    """What all sides share: which tag comes next, which place is read next, from one seed."""

    def __init__(self) -> None:
        chance = random.Random(SEED)
        self.data = chance.randbytes(RECORD_BYTES)
        self.tags = cycle(TAGS)
        self.order = [chance.randrange(READ_BACK) for _ in range(10 * READ_BACK)]
        self.turn = cycle((True, False))


class RedisPy:
    """redis-py's asyncio client, its parser in C (hiredis); `connections` holds one a caller."""

    def __init__(self, connections: list[redis.Redis]) -> None:
        self._connections = connections
        self._sequence = _Sequence()
        self._places: list[tuple[str, bytes]] = []
        self._next = cycle(self._sequence.order)

    async def prepare(self) -> None:
        """Append what the reads will find."""
        for _ in range(READ_BACK):
            tag = next(self._sequence.tags)
            place = await self._connections[0].xadd(tag, {"d": self._sequence.data})
            assert isinstance(place, bytes), "connections decode nothing"
            self._places.append((tag, place))

    def append(self, caller: int) -> Awaitable[object]:
        """XADD."""
        tag = next(self._sequence.tags)
        return self._connections[caller].xadd(tag, {"d": self._sequence.data})

    async def read_next(self, caller: int) -> object:
        """XRANGE ... COUNT 1."""
        tag, place = self._places[next(self._next)]
        return _found(await self._connections[caller].xrange(tag, place, "+", 1))

    async def read_prev(self, caller: int) -> object:
        """XREVRANGE ... COUNT 1."""
        tag, place = self._places[next(self._next)]
        return _found(await self._connections[caller].xrevrange(tag, place, "-", 1))

    async def mixed(self, caller: int) -> object:
        """Append, and at the next call read."""
        return await (self.append if next(self._sequence.turn) else self.read_next)(caller)


class Glide:
    """valkey-glide: a client in Rust, all callers over one connection."""

    def __init__(self, client: GlideClient) -> None:
        self._client = client
        self._sequence = _Sequence()
        self._places: list[tuple[str, IdBound]] = []
        self._next = cycle(self._sequence.order)

    async def prepare(self) -> None:
        """Append what the reads will find."""
        for _ in range(READ_BACK):
            tag = next(self._sequence.tags)
            place = await self._client.xadd(tag, [("d", self._sequence.data)])
            assert place is not None
            self._places.append((tag, IdBound(place)))

    def append(self, caller: int) -> Awaitable[object]:
        """XADD."""
        return self._client.xadd(next(self._sequence.tags), [("d", self._sequence.data)])

    async def read_next(self, caller: int) -> object:
        """XRANGE ... COUNT 1."""
        tag, place = self._places[next(self._next)]
        return _found(await self._client.xrange(tag, place, MaxId(), 1))

    async def read_prev(self, caller: int) -> object:
        """XREVRANGE ... COUNT 1."""
        tag, place = self._places[next(self._next)]
        return _found(await self._client.xrevrange(tag, place, MinId(), 1))

    async def mixed(self, caller: int) -> object:
        """Append, and at the next call read."""
        return await (self.append if next(self._sequence.turn) else self.read_next)(caller)


class IndiLog:
    """The log, embedded or over its processes."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sequence = _Sequence()
        self._places: list[tuple[str, int]] = []
        self._next = cycle(self._sequence.order)

    async def prepare(self) -> None:
        """Append what the reads will find."""
        for _ in range(READ_BACK):
            tag = next(self._sequence.tags)
            place = await self._log.append(self._sequence.data, tags=(tag,))
            self._places.append((tag, place))

    def append(self, caller: int) -> Awaitable[object]:
        """`Log.append`."""
        return self._log.append(self._sequence.data, tags=(next(self._sequence.tags),))

    async def read_next(self, caller: int) -> object:
        """`Log.read_next`."""
        tag, place = self._places[next(self._next)]
        return _found(await self._log.read_next(tag, place))

    async def read_prev(self, caller: int) -> object:
        """`Log.read_prev`."""
        tag, place = self._places[next(self._next)]
        return _found(await self._log.read_prev(tag, place))

    async def mixed(self, caller: int) -> object:
        """Append, and at the next call read."""
        return await (self.append if next(self._sequence.turn) else self.read_next)(caller)


def _found(answer: object) -> object:
    """Every read asks for a record that is there: an empty answer would be a wrong comparison."""
    if not answer:
        raise RuntimeError("a record that was appended was not found")
    return answer


@asynccontextmanager
async def redis_py(server: RedisServer, callers: int) -> AsyncIterator[Peer]:
    """Give all callers one client, which takes connections out of its pool."""
    async with redis.Redis(host="127.0.0.1", port=server.port, max_connections=callers) as client:
        yield RedisPy([client] * callers)


@asynccontextmanager
async def redis_py_tuned(server: RedisServer, callers: int) -> AsyncIterator[Peer]:
    """Connect every caller over the Unix socket."""
    connections = [
        redis.Redis(unix_socket_path=server.path, single_connection_client=True)
        for _ in range(callers)
    ]
    async with AsyncExitStack() as stack:
        for connection in connections:
            await stack.enter_async_context(connection)
        yield RedisPy(connections)


@asynccontextmanager
async def glide(server: RedisServer) -> AsyncIterator[Peer]:
    """Connect once."""
    client = await GlideClient.create(
        GlideClientConfiguration([NodeAddress("127.0.0.1", server.port)], request_timeout=10_000)
    )
    try:
        yield Glide(client)
    finally:
        await client.close()


async def compare(asked: argparse.Namespace, callers: int, operation: str) -> Rounds:
    """Run one operation on every side, in turns.

    Each side is set up for its round and taken down after it, so that what one side holds in
    memory does not make the garbage collections of another one longer.
    """
    found: Rounds = {}
    for _ in range(asked.rounds):
        with redis_server() as server:
            for name, side in sides_of(asked, server, callers).items():
                async with side as peer:
                    await peer.prepare()
                    one: Operation = getattr(peer, operation)
                    rounds = await interleaved(
                        {name: one}, callers=callers, seconds=asked.seconds, rounds=1
                    )
                found.setdefault(name, []).extend(rounds[name])
    return found


def sides_of(
    asked: argparse.Namespace, server: RedisServer, callers: int
) -> dict[str, AbstractAsyncContextManager[Peer]]:
    """Return all sides, not set up yet."""
    return {
        BASE: redis_py(server, callers),
        TUNED: redis_py_tuned(server, callers),
        "valkey-glide": glide(server),
        "indilog": indilog_side(processes=asked.processes),
    }


@asynccontextmanager
async def indilog_side(*, processes: bool) -> AsyncIterator[Peer]:
    """Run a platform with its data in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = platforms.configured(path, processes=processes)
        async with platforms.running(config, processes=processes) as running:
            yield IndiLog(running.log)


def row_of(name: str, rounds: list[Round], base: list[Round]) -> tuple[str, ...]:
    """Return one side's medians, and its ratios to Redis."""
    return (
        name,
        f"{median_of(rounds, lambda r: r.per_second):,.0f}",
        latency(median_of(rounds, lambda r: r.quantile(0.5))),
        latency(median_of(rounds, lambda r: r.quantile(0.99))),
        f"{ratio_of(rounds, base, lambda r: r.per_second):.2f}x",
        f"{ratio_of(rounds, base, lambda r: r.quantile(0.5)):.2f}x",
    )


async def main(asked: argparse.Namespace) -> None:
    """Compare every operation at every number of callers."""
    mode = "3 sequencers, R = 1, processes" if asked.processes else "embedded, R = 1"
    with redis_server() as server:
        version = server.version
    report = Report("IndiLog and Redis Streams", asked, redis=version, indilog=mode, sync="always")
    for operation in asked.operations:
        table = table_of(
            f"{operation}, {RECORD_BYTES} bytes, synced; ratios to {BASE}",
            "side and callers", "ops/s", "p50", "p99", "ops/s ratio", "p50 ratio",
        )  # fmt: skip
        for callers in asked.callers:
            found = await compare(asked, callers, operation)
            report.add(f"{operation} {callers}", found)
            for name, rounds in found.items():
                table.add_row(*row_of(f"{name} {callers}", rounds, found[BASE]))
            table.add_section()
        report.show(table)
    report.write()


if __name__ == "__main__":
    run(
        main,
        arguments(
            (__doc__ or "").partition("\n")[0],
            operations={"nargs": "+", "choices": OPERATIONS, "default": list(OPERATIONS)},
            processes={"action": "store_true", "help": "IndiLog's tiers as processes"},
        ),
    )
