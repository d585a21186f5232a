"""The kinds of log that the contract suite runs against.

A further kind is one entry in `KINDS`: an async context manager that takes a directory of its own
and gives a `LogSource`. Setup and teardown may run in different tasks of one event loop, so it must
not hold a task group or a timeout open. The source may already hold other logs' records, so a slow
kind may share one running platform between tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from indilog.log import LogSource
from indilog.testing import MemoryLogs


@dataclass(frozen=True)
class Kind:
    """One implementation of `Log`, and how to start it.

    Attributes:
        open: gives a source that keeps its data below the directory.
        durable: what was appended is there when the same directory is opened again.
        marks: of every test of this kind, e.g. `pytest.mark.cluster`.
    """

    open: Callable[[Path], AbstractAsyncContextManager[LogSource]]
    durable: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()


@asynccontextmanager
async def memory(directory: Path) -> AsyncIterator[LogSource]:
    yield MemoryLogs()


KINDS: dict[str, Kind] = {
    "memory": Kind(open=memory),
}
