"""Tests for `GET /readyz` whether appends are acknowledged now, by appending a record.

Metrics cannot show that a process hangs, because a hanging process reports none. So the gateway
appends an empty record to the platform's log `$probe`, on the same path as every append. Without
requests to `/readyz` nothing is written.
"""

from __future__ import annotations

import asyncio
from typing import Final

from indilog.base.errors import DiskFullError, IndilogError
from indilog.base.log import LogSource, Session

PROBE_LOG: Final = "$probe"
_VALID_S: Final = 1.0
"""Seconds for which the outcome of a probe also answers later requests."""
_KEPT: Final = 64
"""Number of probe records after which older probe records are trimmed."""


class AppendProbe:
    """Probes whether appends are acknowledged; at most one probe at a time.

    Args:
        logs: the logs of this compute node.
        timeout_s: an append that takes longer counts as not acknowledged.
    """

    def __init__(self, logs: LogSource, *, timeout_s: float) -> None:
        self._log = logs.log(PROBE_LOG, Session())
        self._timeout_s = timeout_s
        self._outcome: asyncio.Task[str | None] | None = None
        self._ended_at = 0.0
        self._appended = 0

    async def failure(self) -> str | None:
        """Return a sentence that says why appends are not acknowledged; None if they are.

        Concurrent requests share one append. A full disk is no failure, because reads are served.
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
