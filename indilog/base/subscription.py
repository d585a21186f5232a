"""Subscribes to a log: reads its history page by page, then new records (API.md, "The log").

While the consumer processes one page, the next page is read. So a slow consumer holds at most two
pages, each bounded in records (`SUBSCRIBE_PAGE`) and in bytes (`page_bytes_max`). A fast consumer
waits one round trip per page. At the end of the log, the read waits at the platform for new
records; until then nothing is sent, and no timer runs. `Log.subscribe`, the gateway and the
invocation service use `pages`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - part of the shell: reads ahead in a task
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Final, Protocol, TypeVar

from indilog.base.errors import IndilogError
from indilog.base.ids import SeqNum, UserTag

SUBSCRIBE_PAGE: Final = 256
"""Records in one page of a subscription."""
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 2.0
"""Longest pause in seconds before an interrupted subscription retries; pauses double up to it."""


class _Ordered(Protocol):
    """The part of a record that a subscription uses."""

    @property
    def seqnum(self) -> SeqNum: ...


_RecordT = TypeVar("_RecordT", bound=_Ordered)


class PagedLog(Protocol[_RecordT]):
    """The part of `indilog.base.log.Log` that a subscription uses."""

    @property
    def name(self) -> str:
        """The name of the log."""

    async def read_range(
        self, tag: UserTag | None, bound: SeqNum, *, limit: int, wait: float
    ) -> list[_RecordT]:
        """Return a page of records, as `Log.read_range` does."""
        ...


async def pages(
    log: PagedLog[_RecordT],
    tag: UserTag | None,
    bound: SeqNum,
    *,
    idle_s: float = math.inf,
    resume_s: float = 0.0,
) -> AsyncGenerator[list[_RecordT], None]:
    """Yield the records with `tag` from `bound` on, in order, page by page. The iteration does not
    end.

    Args:
        log: log to read.
        tag: as in `Log.read_range`.
        bound: as in `Log.read_range`.
        idle_s: seconds without a record after which an empty page is yielded, so that the caller
            can act.
        resume_s: seconds for which retryable errors in a row are retried (for example while the
            platform restarts); then the last error is raised.
    """
    ahead = asyncio.ensure_future(_page(log, tag, bound, idle_s, resume_s))
    try:
        while True:
            page = await ahead
            if page:
                bound = page[-1].seqnum + 1
            ahead = asyncio.ensure_future(_page(log, tag, bound, idle_s, resume_s))
            yield page
    finally:
        ahead.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await ahead


async def _page(
    log: PagedLog[_RecordT], tag: UserTag | None, bound: SeqNum, idle_s: float, resume_s: float
) -> list[_RecordT]:
    loop = asyncio.get_running_loop()
    interrupted: float | None = None
    pause_s = _PAUSE_S_MIN
    while True:
        try:
            page = await log.read_range(tag, bound, limit=SUBSCRIBE_PAGE, wait=idle_s)
        except IndilogError as error:
            now = loop.time()
            if interrupted is None:
                interrupted = now
                if error.retryable and resume_s > 0:
                    _log_change("subscription interrupted", log.name, bound, error)
            if not error.retryable or now + pause_s > interrupted + resume_s:
                raise
        else:
            if interrupted is not None:
                _log_change("subscription resumed", log.name, bound, None)
            return page
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def _log_change(what: str, log: str, bound: SeqNum, error: Exception | None) -> None:
    import structlog  # seldom needed, and this module is imported by each process

    structlog.get_logger().warning(
        what, log=log, seqnum=bound, reason=str(error) if error is not None else None
    )
