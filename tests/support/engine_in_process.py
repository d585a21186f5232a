"""The compute node of a platform of processes, run in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.runtime.cluster.assembly import joined, logs_of
from indilog.runtime.cluster.node_process import node_running
from indilog.runtime.cluster.supervisor import Supervisor

ENGINE = NodeId("engine-0")


@asynccontextmanager
async def engine_of(supervisor: Supervisor, keys: Path | None = None) -> AsyncIterator[Log]:
    """Run the cluster's engine in this process, and yield one of its logs."""
    failures: list[BaseException] = []
    async with node_running(ENGINE, supervisor.metadata_address, failures.append, keys) as node:
        logs = logs_of(node.shell, ENGINE, node.start.config)
        assert logs is not None
        await joined(logs)
        yield logs.log("orders")
    assert not failures


async def append_retrying(log: Log, data: bytes) -> int:
    """Append; retry while the error is retryable."""
    while True:
        try:
            return await log.append(data, tags=["t"])
        except IndilogError as error:
            if not error.retryable:
                raise
