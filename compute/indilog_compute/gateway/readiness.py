"""Tests whether appends are acknowledged now, by appending a record, for `GET /readyz`.

Metrics cannot show that a process hangs, because a hanging process reports no metrics. So the
gateway appends an empty record to the platform's log `$probe`, in the same way as every append. It
appends nothing while there are no requests to `/readyz`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from indilog.base.errors import DiskFullError, IndilogError
from indilog.base.log import LogSource, Session

PROBE_LOG: Final = "$probe"
_VALID_S: Final = 1.0
"""Seconds after the end of a probe for which its outcome also answers later requests."""
_KEPT: Final = 64
"""Each time this many probe records were appended, the older probe records are trimmed."""


class AppendProbe:
    """Probes whether appends are acknowledged; at most one probe at a time.

    Args:
        logs: the logs of this compute node.
        timeout_s: seconds after which an append counts as not acknowledged.
    """

    def __init__(self, logs: LogSource, *, timeout_s: float) -> None:
        self._log = logs.log(PROBE_LOG, Session())
        self._timeout_s = timeout_s
        self._outcome: asyncio.Task[str | None] | None = None
        self._ended_at = 0.0
        self._appended = 0

    async def failure(self) -> str | None:
        """Return a sentence that says why appends are not acknowledged; None: appends are
        acknowledged.

        Concurrent callers share one append. A full disk is not a failure, because reads are served.
        """
        loop = asyncio.get_running_loop()
        outcome = self._outcome
        if outcome is None or (outcome.done() and loop.time() > self._ended_at + _VALID_S):
            outcome = self._outcome = loop.create_task(self._probe())
        return await asyncio.shield(outcome)

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                seqnum = await self._log.append(b"")
                self._appended += 1
                if self._appended % _KEPT == 0:
                    await self._log.trim(seqnum)
        except TimeoutError:
            return (
                f"An append was not acknowledged within {self._timeout_s:g} s; a node of the "
                "platform does not answer, or its disk is slow."
            )
        except DiskFullError:
            return None
        except IndilogError as error:
            return f"An append is refused: {error}"
        finally:
            self._ended_at = asyncio.get_running_loop().time()
        return None
