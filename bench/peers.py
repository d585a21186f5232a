"""Compares IndiLog with Redis Streams, NATS JetStream, PostgreSQL and etcd in one run (WORKLOADS
2).

Every side is driven in the same way: by one or two client processes with closed-loop callers as
tasks of a uvloop. They append records of 1 KiB with one of 20 tags, and read by tag forwards or
backwards from a place. Each side's module (`bench/sides/*.py`) describes its operations. The
durability of its acknowledgements is printed beside its figures. The servers come from Debian's
packages, and keep their data in temporary directories. `bench/support/servers.py` starts and ends
them.

Redis has three clients. The base of the ratios is redis-py's asyncio client with hiredis, as in its
documentation. The others are the same client with the fastest settings that were found, and
valkey-glide. IndiLog has four shapes. Three have R = 1. One is embedded in the only client process.
In another, the client processes are compute nodes of a cluster with 3 sequencers. In the third,
clients use an embedded platform over the network, as with the other systems. The fourth shape has
R = 3, ack quorum 2 and 3 sequencers: the client processes are processes of `indilog up --nodes 3`.

    python -m bench.peers [--seconds 1] [--rounds 5] [--callers 1 64 256] [--clients 1 2]
                          [--sides "PostgreSQL" "indilog, embedded" ...] [--operations append ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from array import array
from asyncio.subprocess import PIPE, Process
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench.sides.client import SIDES
from bench.sides.side import OPERATIONS, RECORD_BYTES
from bench.support import platforms, servers
from bench.support.harness import (
    Report,
    Round,
    Rounds,
    command,
    latency,
    median_of,
    ratio_of,
    table_of,
)
from bench.support.servers import Server
from indilog.base.ids import NodeId
from indilog.cli.start import PlatformLog, check_port_free, platform, wait_ready
from indilog.runtime.cluster.supervisor import processes_config, supervised

BASE: Final = "redis-py"
ANSWER_S_MAX: Final = 120.0
"""A client that is silent for longer than this, plus the measured time, has failed."""
_LINE_BYTES_MAX: Final = 256 * 1024 * 1024
_SYNCED: Final = "every write synced"
_SERVERS: Final[Mapping[str, Callable[[], AbstractContextManager[Server]]]] = {
    "redis-py": servers.redis_server,
    "redis-py, Unix socket": servers.redis_server,
    "valkey-glide": servers.redis_server,
    "NATS JetStream": servers.nats_server,
    "PostgreSQL": servers.postgres_server,
    "etcd": servers.etcd_server,
}
COLUMNS: Final = (
    "side", "callers", "clients", "ops/s", "p50", "p99", "ops/s ratio", "p50 ratio",
    "acknowledged when",
)  # fmt: skip
Found: TypeAlias = dict[str, Rounds]
"""For each operation, the rounds of each side."""


# --- sides


@asynccontextmanager
async def serving(side: str, clients: int) -> AsyncIterator[Server]:
    """Run the server of a side."""
    if side in _SERVERS:
        with _SERVERS[side]() as server:
            yield server
        return
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        if side == "indilog, embedded":
            yield Server({}, "", _SYNCED)
        elif side == "indilog, compute node":
            settings = {"cluster": {"engines": clients}}
            config = platforms.configured(path, processes=True, **settings)
            nodes = [NodeId(f"engine-{number}") for number in range(clients)]
            async with supervised(config, left_out=nodes) as cluster:
                address = {"metadata": cluster.metadata_address}
                yield Server(address, "", f"{_SYNCED}, metalog on 2 of 3")
        elif side == "indilog, one of 3 nodes":
            config = processes_config(overrides={"node": {"data_dir": path}}, shared=3)
            clients_are = [f"node-{2 - number}" for number in range(clients)]
            async with supervised(config, left_out=clients_are) as cluster:
                address = {"metadata": cluster.metadata_address}
                yield Server(address, "", f"{_SYNCED}, records and metalog on 2 of 3")
        else:
            port = servers.free_port()
            check_port_free(port)
            log = PlatformLog(Path(path) / "data")
            url = f"http://{servers.HOST}:{port}"
            with platform(log, Path(path) / "data", port) as process:
                await asyncio.to_thread(wait_ready, process, url, log)
                yield Server({"url": url}, "", _SYNCED)


class SideClient:
    """A client process of one side (`bench.sides.client`)."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def send(self, value: dict[str, Any]) -> None:
        """Send one request to the process."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the answer of the process."""
        assert self._process.stdout is not None, "it is a pipe"
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds + ANSWER_S_MAX)
        if not line:
            raise SystemExit("A client process ended; see its output above.")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def client_process() -> AsyncIterator[SideClient]:
    """Run a client process until the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.sides.client", stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES_MAX
    )
    try:
        yield SideClient(process)
    finally:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


# --- measuring


async def measure(
    side: str, server: Server, asked: argparse.Namespace, callers: int, clients: int
) -> dict[str, Round]:
    """Open a side in its client processes; run each of its operations once."""
    found: dict[str, Round] = {}
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(client_process()) for _ in range(clients)]
        for number, process in enumerate(processes):
            share = callers // clients + (number < callers % clients)
            address = server.address
            await process.send(
                {"side": side, "address": address, "client": number, "callers": share}
            )
        ready = [await process.answer() for process in processes]
        for operation in asked.operations:
            if operation in ready[0]["lacks"]:
                continue
            for process in processes:
                await process.send({"operation": operation, "seconds": asked.seconds})
            answers = [await process.answer(asked.seconds) for process in processes]
            found[operation] = merged(answers)
    return found


def merged(answers: list[dict[str, Any]]) -> Round:
    """Merge the simultaneous measurements of several clients."""
    latencies = array("d")
    for answer in answers:
        latencies.frombytes(b64decode(answer["latencies"]))
    return Round(
        len(latencies),
        max(answer["seconds"] for answer in answers),
        sum(answer["cpu_s"] for answer in answers),
        latencies,
    )


async def compare(
    asked: argparse.Namespace, callers: int, clients: int, said: dict[str, Server]
) -> Found:
    """Run every operation on every side, side after side, round after round.

    Each side is started for its round and stopped after it, so no two sides run at the same time.
    The order is reversed with every round.
    """
    found: Found = {operation: {} for operation in asked.operations}
    order = [side for side in asked.sides if clients == 1 or side != "indilog, embedded"]
    for _ in range(asked.rounds):
        for side in order:
            async with serving(side, clients) as server:
                said[side] = server
                rounds = await measure(side, server, asked, callers, clients)
            for operation, one in rounds.items():
                found[operation].setdefault(side, []).append(one)
        order.reverse()
    return found


# --- the table


def row_of(
    side: str, callers: int, clients: int, rounds: list[Round], base: list[Round] | None
) -> tuple[str, ...]:
    """Return one side's medians, and its ratios to Redis."""
    ratios = ("", "") if base is None else (
        f"{ratio_of(rounds, base, lambda r: r.per_second):.2f}x",
        f"{ratio_of(rounds, base, lambda r: r.quantile(0.5)):.2f}x",
    )  # fmt: skip
    return (
        side,
        str(callers),
        str(clients),
        f"{median_of(rounds, lambda r: r.per_second):,.0f}",
        latency(median_of(rounds, lambda r: r.quantile(0.5))),
        latency(median_of(rounds, lambda r: r.quantile(0.99))),
        *ratios,
    )


async def main(asked: argparse.Namespace) -> None:
    """Compare every operation at every number of callers and clients."""
    report = Report("IndiLog beside others", asked, replicas="1", record=f"{RECORD_BYTES} bytes")
    said: dict[str, Server] = {}
    tables = {
        operation: table_of(f"{operation}; ratios to {BASE}", *COLUMNS)
        for operation in asked.operations
    }
    for callers in asked.callers:
        for clients in (number for number in asked.clients if number <= callers):
            found = await compare(asked, callers, clients, said)
            for operation, sides in found.items():
                report.add(f"{operation} {callers} {clients}", sides)
                for side, rounds in sorted(
                    sides.items(), key=lambda one: asked.sides.index(one[0])
                ):
                    row = row_of(side, callers, clients, rounds, sides.get(BASE))
                    tables[operation].add_row(*row, said[side].durability)
                tables[operation].add_section()
    for operation in asked.operations:
        report.show(tables[operation])
    versions = {side: server.version for side, server in said.items() if server.version}
    report.keep("versions", versions)
    report.say(", ".join(f"{side} {version}" for side, version in versions.items()))
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        operations={"nargs": "+", "choices": OPERATIONS, "default": list(OPERATIONS)},
        sides={"nargs": "+", "choices": tuple(SIDES), "default": list(SIDES)},
        clients={"nargs": "+", "type": int, "default": [1, 2], "help": "client processes"},
    )
