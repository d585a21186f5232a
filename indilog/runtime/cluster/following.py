"""Follows keys of the metadata store while a block runs (ARCHITECTURE 11).

`terms`, `node_process` and the modules of `machines` use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import structlog

from indilog.base.errors import IndilogError
from indilog.runtime.metadata.store import MetadataStore, Versioned

RETRY_S: Final = 0.2
"""After this many seconds, a request without an answer from the metadata store is repeated."""

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def followed(
    store: MetadataStore, key: str, handle: Callable[[Versioned], None]
) -> AsyncIterator[None]:
    """Call `handle` with the value of a key, and with each later value, while the block runs.
    Values that are soon replaced may be skipped. If `handle` raises an `IndilogError` for a value,
    it is called again later.
    """
    async with running(_follow(store, key, handle)):
        yield


async def _follow(store: MetadataStore, key: str, handle: Callable[[Versioned], None]) -> NoReturn:
    version = 0
    while True:
        try:
            found = await store.watch(key, after=version)
            if found is not None:
                handle(found)
                version = found.version
        except IndilogError as error:
            _log.warning("changes are not followed for now", key=key, reason=str(error))
            await asyncio.sleep(RETRY_S)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[None]:
    """Run an endless task while the block runs."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _report(task: asyncio.Task[NoReturn]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("this process follows no changes of the cluster any more", reason=repr(error))
