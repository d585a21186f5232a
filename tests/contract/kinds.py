"""The kinds of log that the contract suite runs against.

A further kind is one entry in `KINDS`: an async context manager that takes a directory of its own
and yields a `LogSource`. Setup and teardown may run in different tasks of one event loop, so a kind
must not hold a task group or a timeout open. The source may already hold other logs' records, so a
slow kind may share one running platform between tests.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from indilog.base.log import RESERVED, Log, LogSource, Session
from indilog.base.log_kinds import OBJECT_STORE, ORDER_FIRST, OWNED, SHARED, LogKind
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.link.remote import RemoteLogs
from indilog.remote_client import connect
from indilog.runtime.cluster.assembly import embedded
from indilog.testing import MemoryLogs
from indilog_cells.driver import driver_running
from indilog_cells.index import GENERATION_LIMITS, GenerationLimits
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at
from indilog_compute.local_log import LocalLogs
from indilog_compute.log_kinds import LogKinds
from indilog_compute.log_kinds.segments import FIRST
from tests.cluster.platform_process import PlatformProcess, platform
from tests.grpc.log import GrpcLogs, grpc_address
from tests.support.link_pair import linked_logs
from tests.support.s3_server import credentials_set, s3_running


@dataclass(frozen=True)
class Kind:
    """One implementation of `Log`, and how to start it.

    Attributes:
        open: yields a source that keeps its data below the directory.
        durable: whether acknowledged records survive a reopening of the same directory.
        marks: marks of every test of this kind, e.g. `pytest.mark.cluster`.
        is_busy: the platform appends records of its own meanwhile, so seqnums have gaps; tests
            marked `exact_seqnums` are skipped.
        is_variant: another arrangement of a kind in the table, or a kind whose log is another
            one's to libraries. The tests of libraries show there what they show of other kinds, so
            they run only with `--all`.
        is_costly: a variant whose calls cost more than those of other kinds, and whose sessions,
            trims and waits are in code that other kinds run, too. So tests of these run there only
            with `--all`.
    """

    open: Callable[[Path], AbstractAsyncContextManager[LogSource]]
    durable: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()
    is_busy: bool = False
    is_variant: bool = False
    is_costly: bool = False


@asynccontextmanager
async def memory(directory: Path) -> AsyncIterator[LogSource]:
    yield MemoryLogs()


@asynccontextmanager
async def embedded_platform(directory: Path) -> AsyncIterator[LogSource]:
    """All roles in this process, with syncs, on small segments."""
    config = Config(node=node_config(data_dir=directory, segment_bytes=8 * MIB))
    async with embedded(config) as platform:
        yield platform.logs


@asynccontextmanager
async def embedded_replicated(directory: Path) -> AsyncIterator[LogSource]:
    """Three sequencers, two replicas, three index shards, and no local index: all roles, one
    process.
    """
    cluster = ClusterConfig(sequencers=3, storage_nodes=2, replicas=2, index_shards=3)
    node = node_config(
        data_dir=directory,
        segment_bytes=8 * MIB,
        local_index="none",
        record_cache_bytes_max=0,
    )
    async with embedded(Config(cluster=cluster, node=node)) as platform:
        yield platform.logs


class SpreadSource:
    """Logs through all compute nodes: each opened log uses the next one."""

    def __init__(self, sources: Iterable[LogSource]) -> None:
        self._sources = itertools.cycle(sources)

    def log(self, name: str, session: Session) -> Log:
        return next(self._sources).log(name, session)


@asynccontextmanager
async def embedded_spread(directory: Path) -> AsyncIterator[LogSource]:
    """Three compute nodes, each with a shard, in one process."""
    cluster = ClusterConfig(engines=3)
    node = node_config(data_dir=directory, segment_bytes=8 * MIB)
    async with embedded(Config(cluster=cluster, node=node)) as platform:
        yield SpreadSource(platform.engines.values())


class SwitchingSource:
    """Logs that are switched between kinds while they are used; each has its first switches when
    it is opened first.

    Args:
        logs: the logs of a platform.
        kinds: the kinds of each log after its switches.
    """

    def __init__(self, logs: LocalLogs, kinds: Sequence[LogKind]) -> None:
        self._logs = logs
        self._kinds = kinds
        self._loop = asyncio.get_running_loop()
        self._switching: dict[str, asyncio.Task[None]] = {}

    def log(self, name: str, session: Session) -> Log:
        log = self._logs.log(name, session)
        if name not in self._switching and not name.startswith(RESERVED):
            self._switching[name] = self._loop.create_task(self._switch(name))
        return log

    async def _switch(self, name: str) -> None:
        assert self._logs.kinds is not None
        for kind in self._kinds:
            await self._logs.kinds.switch(name, kind)

    async def close(self) -> None:
        for switching in self._switching.values():
            await switching


@asynccontextmanager
async def embedded_switching(
    directory: Path, *, kinds: Sequence[LogKind] = (OBJECT_STORE, SHARED, OWNED)
) -> AsyncIterator[LogSource]:
    """An embedded platform, whose logs are switched while they are used."""
    config = Config(node=node_config(data_dir=directory, segment_bytes=8 * MIB))
    async with embedded(config) as platform:
        source = SwitchingSource(platform.logs, kinds)
        yield source
        await source.close()


class LinkedSource:
    """Logs at the other end of three links: each opened log uses the next link, so that a session
    spans several links.
    """

    def __init__(self, logs: LogSource) -> None:
        self._links = itertools.cycle([linked_logs(logs) for _ in range(3)])

    def log(self, name: str, session: Session) -> Log:
        return next(self._links).log(name, session)


@asynccontextmanager
async def linked(directory: Path) -> AsyncIterator[LogSource]:
    """An embedded platform as its workers see it: over links, in this process."""
    async with embedded_platform(directory) as logs:
        yield LinkedSource(logs)


_SourceT = TypeVar("_SourceT", bound=LogSource)


async def quiet(source: _SourceT) -> _SourceT:
    """Wait until appends of earlier tests are ordered, also those whose callers were cancelled.

    The tests share a platform with one compute node, which orders its appends one after another.
    """
    await source.log("quiet", Session()).append(b"")
    return source


@asynccontextmanager
async def remote(directory: Path) -> AsyncIterator[LogSource]:
    """A client of `indilog up`, over its gateway."""
    async with connect(running_platform().url) as client:
        yield await quiet(RemoteLogs(client))


@asynccontextmanager
async def remote_processes(directory: Path) -> AsyncIterator[LogSource]:
    """A client of `indilog up --processes`: 3 sequencers, 2 storage nodes, R = 2."""
    async with connect(running_platform("--processes").url) as client:
        yield await quiet(RemoteLogs(client))


@asynccontextmanager
async def over_grpc(directory: Path) -> AsyncIterator[LogSource]:
    """A client of the gRPC server of `indilog up --grpc-port 0`."""
    address, token = grpc_address(running_platform("--grpc-port", "0").url)
    async with grpc.aio.insecure_channel(address) as channel:
        yield await quiet(GrpcLogs(channel, token))


@asynccontextmanager
async def cells_at(
    place: str,
    folder: str,
    *,
    is_shared: bool,
    generation_limits: GenerationLimits = GENERATION_LIMITS,
) -> AsyncIterator[CellLogs]:
    """Logs over the objects of one folder of an object store."""
    store = object_store_at(place, timeout_s=10.0)
    cells = await ObjectCells.created(store, folder, generation_limits=generation_limits)
    async with driver_running(cells, is_shared=is_shared) as driver:
        yield CellLogs(driver)


@asynccontextmanager
async def object_directory(directory: Path) -> AsyncIterator[LogSource]:
    """Logs over the files of a directory, which no other process uses."""
    async with cells_at(str(directory / "objects"), "log", is_shared=False) as logs:
        yield logs


@asynccontextmanager
async def object_directory_small(directory: Path) -> AsyncIterator[LogSource]:
    """The same, with generations of the index of 3 cells, so that all reads use closed ones."""
    small = GenerationLimits(cells=3)
    place = str(directory / "objects")
    async with cells_at(place, "log", is_shared=False, generation_limits=small) as logs:
        yield logs


@asynccontextmanager
async def object_directory_shared(directory: Path) -> AsyncIterator[LogSource]:
    """Three drivers of one log over a directory, as in three processes."""
    async with contextlib.AsyncExitStack() as stack:
        place = str(directory / "objects")
        opened = [cells_at(place, "log", is_shared=True) for _ in range(3)]
        yield SpreadSource([await stack.enter_async_context(logs) for logs in opened])


@asynccontextmanager
async def object_s3(directory: Path) -> AsyncIterator[LogSource]:
    """Logs over the objects of an S3-compatible server, one folder for each directory."""
    place = running_s3()
    with credentials_set():
        async with cells_at(place, directory.name, is_shared=True) as logs:
            yield logs


@asynccontextmanager
async def order_first(directory: Path) -> AsyncIterator[LogSource]:
    """A log of kind order-first: two compute nodes, chains of two storage nodes, in one process."""
    cluster = ClusterConfig(engines=2, storage_nodes=2, replicas=2)
    config = Config(cluster=cluster, node=node_config(data_dir=directory, segment_bytes=8 * MIB))
    async with embedded(config) as platform:
        await created_kinds(platform.logs).create("contract", "order-first")
        every = [created_kinds(logs) for logs in platform.engines.values()]
        yield SpreadSource([await kinds._opened["contract", FIRST].logs() for kinds in every])


@asynccontextmanager
async def owned(directory: Path) -> AsyncIterator[LogSource]:
    """A log of kind owned: two compute nodes, three storage nodes, one process."""
    cluster = ClusterConfig(engines=2, storage_nodes=3, replicas=3)
    node = node_config(data_dir=directory, segment_bytes=8 * MIB)
    async with embedded(Config(cluster=cluster, node=node)) as platform:
        await created_kinds(platform.logs).create("contract", "owned")
        every = [created_kinds(logs) for logs in platform.engines.values()]
        yield SpreadSource([await kinds._opened["contract", FIRST].logs() for kinds in every])


def created_kinds(logs: LocalLogs) -> LogKinds:
    """Return the kinds of logs of a compute node."""
    assert logs.kinds is not None
    return logs.kinds


@functools.cache
def running_s3() -> str:
    """Start an S3-compatible server once for all tests of this process; return its place."""
    until_exit = contextlib.ExitStack()
    server = until_exit.enter_context(s3_running())
    atexit.register(until_exit.close)
    return server.place


@functools.cache
def running_platform(*options: str) -> PlatformProcess:
    """Start a platform once for all tests of this process; it ends with the process."""
    until_exit = contextlib.ExitStack()
    directory = until_exit.enter_context(tempfile.TemporaryDirectory(prefix="indilog-contract-"))
    running = until_exit.enter_context(platform(Path(directory), *options))
    atexit.register(until_exit.close)
    return running


KINDS: dict[str, Kind] = {
    "memory": Kind(open=memory),
    "embedded": Kind(open=embedded_platform, durable=True),
    "embedded, over links": Kind(open=linked, durable=True, is_variant=True, is_costly=True),
    "remote": Kind(open=remote, marks=(pytest.mark.cluster,), is_variant=True),
    "gRPC": Kind(open=over_grpc, marks=(pytest.mark.cluster,), is_variant=True, is_costly=True),
    "remote, processes": Kind(
        open=remote_processes,
        marks=(pytest.mark.cluster, pytest.mark.repeated),
        is_variant=True,
        is_costly=True,
    ),
    "embedded, three compute nodes": Kind(open=embedded_spread, durable=True, is_variant=True),
    "embedded, switched meanwhile": Kind(
        open=embedded_switching, durable=True, is_busy=True, is_variant=True
    ),
    "embedded, switched to storage nodes": Kind(
        open=functools.partial(embedded_switching, kinds=(ORDER_FIRST, OBJECT_STORE, ORDER_FIRST)),
        durable=True,
        marks=(pytest.mark.repeated,),
        is_busy=True,
        is_variant=True,
    ),
    "embedded, switched between storage nodes": Kind(
        open=functools.partial(embedded_switching, kinds=(OWNED, ORDER_FIRST, SHARED)),
        durable=True,
        marks=(pytest.mark.repeated,),
        is_busy=True,
        is_variant=True,
    ),
    "object-store, directory": Kind(open=object_directory, durable=True),
    "object-store, directory, small index": Kind(
        open=object_directory_small, durable=True, is_variant=True, is_costly=True
    ),
    "object-store, directory, three processes": Kind(
        open=object_directory_shared, durable=True, is_variant=True, is_costly=True
    ),
    "object-store, S3": Kind(
        open=object_s3,
        durable=True,
        marks=(pytest.mark.repeated,),
        is_variant=True,
        is_costly=True,
    ),
    "order-first": Kind(open=order_first, durable=True, is_variant=True),
    "owned": Kind(open=owned, durable=True, is_variant=True),
    "embedded, replicated, without local index": Kind(
        open=embedded_replicated, durable=True, is_variant=True
    ),
}
