"""Renews a lease while a block runs, and ends the block when the lease is lost. `Lock` uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bokiflow.runs.errors import LockLostError
from indilog import IndilogError

_RENEWALS_PER_LEASE: Final = 3


class Renewal:
    """Extends a lease periodically while the task that created this object runs its block.

    If no renewal reaches the log before the lease has ended, the lease counts as lost: another
    holder may then have the lock.

    Args:
        extend: extends the lease.
        lease_s: length of each lease, in seconds.
        left_s: seconds that are left of the first lease. They are fewer than `lease_s` if the
            answer of the log was slow.
    """

    def __init__(
        self, extend: Callable[[float], Awaitable[None]], lease_s: float, left_s: float
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "a lock is renewed for a task"
        self._extend = extend
        self._lease_s = lease_s
        self._left_s = left_s
        self._valid_until = asyncio.get_running_loop().time() + left_s
        self._holder = task
        self._cancelling = task.cancelling()
        self._is_lost = False
        self._task = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        now = asyncio.get_running_loop().time
        valid_until = self._valid_until
        pause_s = self._lease_s / _RENEWALS_PER_LEASE
        await asyncio.sleep(pause_s - (self._lease_s - self._left_s))
        while True:
            asked = now()
            try:
                async with asyncio.timeout_at(valid_until):
                    await self._extend(self._lease_s)
                valid_until = asked + self._lease_s
            except LockLostError:
                break
            except (IndilogError, TimeoutError):
                if now() >= valid_until:
                    break
            await asyncio.sleep(min(pause_s, valid_until - now()))
        self._is_lost = True
        self._holder.cancel()

    async def stop(self, kind: type[BaseException] | None) -> bool:
        """Stop renewing; return whether the block ends because the lease was lost.

        Args:
            kind: type of the error with which the block ended; None: there is no error.
        """
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._is_lost:
            return False
        others = self._holder.uncancel() > self._cancelling
        return not others and (kind is None or issubclass(kind, asyncio.CancelledError))
