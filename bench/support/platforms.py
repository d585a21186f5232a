"""Starts platforms for benchmarks: embedded in this process, or with the tiers as separate
processes.

With processes, every role except the engines runs in a process of its own. This process runs all
compute nodes, so callers are at the same place as functions.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from indilog.base.ids import NodeId
from indilog.base.log import Log, Session
from indilog.base.telemetry import configure_logging
from indilog.config import Config, config_from
from indilog.runtime.cluster.assembly import embedded, joined, kinds_served, logs_of
from indilog.runtime.cluster.node_process import node_running
from indilog.runtime.cluster.supervisor import supervised
from indilog_compute.local_log import LocalLogs

Status: TypeAlias = dict[str, dict[str, int]]
"""Entries, bytes, hits and misses of each part of the local index, and of the record cache."""

PROCESSES: Mapping[str, Any] = {"sequencers": 3, "storage_nodes": 1, "replicas": 1}
"""The layout that is compared with a single process: three sequencers, and one copy of each record,
as in an embedded platform.
"""


class Usage(NamedTuple):
    """The resources that a process has used."""

    cpu_s: float
    resident_bytes: int


@dataclasses.dataclass(frozen=True)
class Bench:
    """A platform under test, seen from its compute node."""

    logs: tuple[Log, ...]
    """The same log, through each compute node."""
    config: Config
    status: Callable[[], Status]
    """Returns the status, summed over the compute nodes."""
    usage: Callable[[], dict[str, Usage]]
    """Returns the resources that each process has used."""

    @property
    def log(self) -> Log:
        """The log, through the first compute node."""
        return self.logs[0]

    def hit_ratio(self, before: Status, part: str) -> float | None:
        """Return the share of the lookups since `before` that a part answered; None: no lookups."""
        now = self.status()
        hits = now[part]["hits"] - before[part]["hits"]
        asked = hits + now[part]["misses"] - before[part]["misses"]
        return hits / asked if asked else None


def configured(path: str | Path, *, processes: bool = False, **settings: dict[str, Any]) -> Config:
    """Return the defaults with some settings changed (`node={...}`, `cluster={...}`), in `path`."""
    node = {**settings.get("node", {}), "data_dir": Path(path)}
    cluster = {**(PROCESSES if processes else {}), **settings.get("cluster", {})}
    return config_from(overrides={"cluster": cluster, "node": node})


@asynccontextmanager
async def running(config: Config, *, processes: bool = False) -> AsyncIterator[Bench]:
    """Run a platform; yield one log of it."""
    configure_logging("console", "warning")
    async with _processes(config) if processes else _embedded(config) as bench:
        yield bench


@asynccontextmanager
async def _embedded(config: Config) -> AsyncIterator[Bench]:
    async with embedded(config) as platform:
        yield _bench_of(tuple(platform.engines.values()), config, {})


@asynccontextmanager
async def compute_node(config: Config, *, processes: bool) -> AsyncIterator[LocalLogs]:
    """Run a platform; yield its first compute node, which serves logs of all kinds."""
    if not processes:
        async with embedded(config) as platform:
            yield platform.logs
        return
    names = [NodeId(f"engine-{number}") for number in range(config.cluster.engines)]
    async with (
        supervised(config, left_out=names) as cluster,
        _engine(names[0], cluster.metadata_address, config.node.messages.node_keys) as logs,
        kinds_served(logs, config, config.node.data_dir),
    ):
        yield logs


@asynccontextmanager
async def _processes(config: Config) -> AsyncIterator[Bench]:
    names = [NodeId(f"engine-{number}") for number in range(config.cluster.engines)]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(supervised(config, left_out=names))
        metadata = cluster.metadata_address
        keys = config.node.messages.node_keys
        engines = [await stack.enter_async_context(_engine(name, metadata, keys)) for name in names]
        pids = {NodeId(name): process.pid for name, process in cluster.processes.items()}
        yield _bench_of(
            tuple(engines), config, {name: pid for name, pid in pids.items() if pid is not None}
        )


@asynccontextmanager
async def joined_as(process: str, metadata: str) -> AsyncIterator[Log]:
    """Be the process of a cluster with this name; yield a log through the compute node that the
    process has.
    """
    async with _engine(process, metadata) as logs:
        yield logs.log("bench", Session())


@asynccontextmanager
async def _engine(
    process: str, metadata: str, keys: Path | None = None
) -> AsyncIterator[LocalLogs]:
    async with node_running(process, metadata, _raise, keys) as running:
        found = (logs_of(running.shell, node, running.start.config) for node in running.nodes)
        logs = next((logs for logs in found if logs is not None), None)
        assert logs is not None, "the process has a compute node"
        await joined(logs)
        yield logs


def _bench_of(engines: tuple[LocalLogs, ...], config: Config, pids: Mapping[NodeId, int]) -> Bench:
    processes = {NodeId("this process"): os.getpid(), **pids}
    return Bench(
        logs=tuple(logs.log("bench", Session()) for logs in engines),
        config=config,
        status=lambda: _summed([logs.engine.status() for logs in engines]),
        usage=lambda: {str(name): usage_of(pid) for name, pid in processes.items()},
    )


def _summed(statuses: list[Status]) -> Status:
    return {
        part: {figure: sum(status[part][figure] for status in statuses) for figure in figures}
        for part, figures in statuses[0].items()
    }


def _raise(error: BaseException) -> None:
    raise error


def usage_of(pid: int) -> Usage:
    """Return the resources that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), resident)
