"""Measures writes and watches of metadata stores. These are the embedded one (in its own process,
and served to another), one ZooKeeper server, and an ensemble of three.

A write is a compare-and-set of a key of the caller's own, durable when it returns. Each store syncs
it to disk, the ensemble on two servers. The latency of a watch is the time from the start of a
write until another client has its value. All servers run on this machine.

    python -m bench.cluster.metadata_store [--seconds 2] [--rounds 5] [--callers 1 16 64]
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import uvloop

from bench.support.harness import (
    ROOT,
    Operation,
    Report,
    arguments,
    figures_of,
    interleave,
    table_of,
)
from indilog.config import NodeConfig, node_config
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.service import MetadataServer
from indilog.runtime.metadata.store import MetadataStore, Written
from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore
from tests.support.zookeeper_server import ensemble_running, hosts_of, zookeeper_running

SERVE = "--serve"
VALUE = b"x" * 100

Clients: TypeAlias = dict[str, tuple[MetadataStore, MetadataStore]]
"""For each side: the client that writes, and the client that watches."""


async def serve(directory: Path) -> None:
    """Serve an embedded store in this process until its standard input ends."""
    with EmbeddedMetadataStore(directory / "metadata", NodeConfig()) as store:
        server = MetadataServer(store, f"unix://{directory}/m", NodeConfig())
        await asyncio.to_thread(sys.stdin.read)
        await server.close()


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Clients]:
    """Run all stores."""
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(EmbeddedMetadataStore(directory / "metadata", NodeConfig()))
        clients: Clients = {"embedded": (store, store)}
        served = directory / "served"
        served.mkdir()
        command = [sys.executable, "-m", "bench.cluster.metadata_store", SERVE, str(served)]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220 before it
        )
        stack.callback(process.terminate)
        address = f"unix://{served}/m"
        pair = [
            await stack.enter_async_context(MetadataClient(address, NodeConfig())) for _ in range(2)
        ]
        clients["embedded, served"] = (pair[0], pair[1])
        one = stack.enter_context(zookeeper_running(directory / "one", synced=True))
        three = stack.enter_context(ensemble_running(directory / "three", synced=True))
        for name, servers in (("ZooKeeper", [one]), ("ZooKeeper, 3 servers", three)):
            config = node_config(zookeeper_hosts=hosts_of(servers))
            stores = [
                await stack.enter_async_context(await ZooKeeperMetadataStore.open(config))
                for _ in range(2)
            ]
            clients[name] = (stores[0], stores[1])
        yield clients


def writes(store: MetadataStore) -> Operation:
    """Return an operation that sets the caller's key once more."""
    versions: dict[int, int] = {}

    async def write(caller: int) -> None:
        expected = versions.get(caller, 0)
        outcome = await store.compare_and_set(f"set/{caller}", VALUE, expected_version=expected)
        assert isinstance(outcome, Written) or not expected, "each caller has a key of its own"
        versions[caller] = outcome.version

    return write


class Watching:
    """A client that watches one key, and another one that writes it."""

    def __init__(self, writer: MetadataStore, watcher: MetadataStore) -> None:
        self._writer = writer
        self._watcher = watcher
        self._version = 0
        self._seen: asyncio.Queue[int] = asyncio.Queue()
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        version = 0
        while True:
            found = await self._watcher.watch("watched", after=version)
            assert found is not None
            version = found.version
            self._seen.put_nowait(version)

    async def operation(self, _: int) -> None:
        """Write, and wait until the watcher has the value."""
        expected = self._version
        outcome = await self._writer.compare_and_set("watched", VALUE, expected_version=expected)
        assert isinstance(outcome, Written)
        self._version = outcome.version
        while await self._seen.get() < outcome.version:
            pass


def main() -> None:
    """Measure, and print tables."""
    if sys.argv[1:2] == [SERVE]:
        uvloop.run(serve(Path(sys.argv[2])))
        return
    asked = arguments(__doc__, callers={"type": int, "nargs": "+", "default": [1, 16, 64]})
    report = Report("metadata stores", asked)

    async def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as directory:
            async with opened(Path(directory)) as clients:
                table = table_of("writes", "store", "callers", "1/s", "p50", "p99", "CPU each")
                for callers in asked.callers:
                    found = await interleave(
                        {name: writes(pair[0]) for name, pair in clients.items()},
                        callers=callers,
                        seconds=asked.seconds,
                        rounds=asked.rounds,
                    )
                    report.add(f"writes, {callers} callers", found)
                    for name, rounds in found.items():
                        table.add_row(name, str(callers), *figures_of(rounds))
                report.show(table)
                watching = {name: Watching(*pair) for name, pair in clients.items()}
                found = await interleave(
                    {name: each.operation for name, each in watching.items()},
                    callers=1,
                    seconds=asked.seconds,
                    rounds=asked.rounds,
                )
                report.add("watches", found)
                table = table_of("a write until its watcher has it", "store", "1/s", "p50", "p99")
                for name, rounds in found.items():
                    table.add_row(name, *figures_of(rounds)[:3])
                report.show(table)
                for each in watching.values():
                    each.task.cancel()

    uvloop.run(measure())
    report.write()


if __name__ == "__main__":
    main()
