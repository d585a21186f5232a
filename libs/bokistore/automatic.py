"""A service of an application that calls `Store.collect` whenever enough history has become old.

Every worker process runs the service; the log decides which process collects. A process collects if
enough history has become old, and if no collection has recorded its progress for `EVERY_S` seconds.
Two processes may still collect at once. Then the same work is done twice, which is harmless.

A collection pauses after each piece of work, so that it works for a share of the time only. If it
is interrupted, the next one continues where it ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from bokistore.collection import KEEP_IDS_S, KEEP_S, check_spans
from bokistore.store import Store
from indilog import App, Context
from indilog.sdk import Logs

EVERY_S: Final = 60.0
"""Seconds between two checks whether enough history has become old."""
SHARE: Final = 0.1
"""Largest share of its time for which a process collects, by default."""
_PIECE_S: Final = 0.02
"""Seconds of work before a pause."""

_logger = logging.getLogger(__name__)


class AutomaticCollection:
    """Collects the objects of one log while `run` runs.

    Args:
        log: name of the log.
        keep: seconds of history that are kept; see `Store.collect`.
        keep_ids: seconds for which ids are kept; see `Store.collect`.
        share: largest share of the time that collections take (above 0, at most 1).
        every: seconds between two checks whether enough history has become old.
        pause: waits for a number of seconds.
        monotonic: returns seconds of a clock that cannot be set.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        log: str,
        *,
        keep: float = KEEP_S,
        keep_ids: float = KEEP_IDS_S,
        share: float = SHARE,
        every: float = EVERY_S,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        check_spans(keep, keep_ids)
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share!r}.")
        if not every > 0:
            raise ValueError(f"every must be a number of seconds above 0, not {every!r}.")
        self._log = log
        self._keep_s = keep
        self._keep_ids_s = keep_ids
        self._share = share
        self._every_s = every
        self._pause = pause
        self._monotonic = monotonic
        self._resumed_s = 0.0

    async def run(self, logs: Logs) -> None:
        """Collect whenever enough history has become old, until cancelled."""
        while True:
            store = Store(logs.log(self._log))
            if await self.is_due(store):
                self._resumed_s = self._monotonic()
                end = await store.collect(
                    keep=self._keep_s, keep_ids=self._keep_ids_s, pace=self._pace
                )
                _logger.info("Collected the objects of log %r below seqnum %d.", self._log, end)
            await self._pause(self._every_s)

    async def is_due(self, store: Store) -> bool:
        """Tell whether this process should collect now."""
        status = await store.collection_status(keep=self._keep_s)
        return status.is_behind and status.idle_s >= self._every_s

    async def _pace(self) -> None:
        """After a piece of work, pause long enough to keep the share."""
        worked_s = self._monotonic() - self._resumed_s
        if worked_s >= _PIECE_S:
            await self._pause(worked_s * (1 / self._share - 1))
            self._resumed_s = self._monotonic()


def collect_automatically(
    app: App,
    log: str,
    *,
    keep: float = KEEP_S,
    keep_ids: float = KEEP_IDS_S,
    share: float = SHARE,
) -> None:
    """Have an application collect the objects of a log while it is deployed, without further calls.

    It frees the history that `Store.collect` frees. All worker processes together work at it for
    about `share` of one process's time; `Store.collection_status` shows how far the collection is.

    Args:
        app: the application.
        log: name of the log of the objects.
        keep: seconds of history that are kept.
        keep_ids: seconds for which ids of transactions are kept.
        share: largest share of the time for which a process works at it (above 0, at most 1).

    Raises:
        ValueError: an argument is out of its range.
    """
    automatic = AutomaticCollection(log, keep=keep, keep_ids=keep_ids, share=share)

    async def collect(ctx: Context) -> None:
        await automatic.run(ctx)

    taken = [name for name in app.services if name.startswith("collect-")]
    app.add_service(collect, name=f"collect-{len(taken) + 1}")
