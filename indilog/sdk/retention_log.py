"""Stores retention policies as records of the reserved log `$retention`.

Policies survive restarts, and trims of the logs to which they apply. A policy is one record tagged
with the name of its log; the newest record of a name is in force. docs/FORMATS.md has the format.
The retention service of a compute node and the in-memory log of tests use this module.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import structlog

from indilog.base.errors import DataLossError, InvalidTagError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import After, Entry, Log, LogSource, Record, Session
from indilog.base.retention import Retention, checked_retention
from indilog.sdk.losses import Losses

RETENTION_LOG: Final = "$retention"


class _Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A record of `$retention`. Unknown fields are ignored."""

    version: Literal[1]
    log: str
    age_s: float | None = None
    size_bytes: int | None = None


async def record_policy(
    policies: Log, log: str, retention: Retention, *, after: After | None = None
) -> None:
    """Record that `retention` is the new policy of `log`, if the condition holds. It raises the
    errors of `Log.append_batch`.
    """
    policy = _Policy(version=1, log=log, age_s=retention.age_s, size_bytes=retention.size_bytes)
    await policies.append_batch([Entry(msgspec.json.encode(policy), [log])], after=after)


async def recorded_policy(policies: Log, log: str) -> Retention:
    """Return the newest policy of `log` that the session of `policies` can see."""
    record = await policies.read_prev(log)
    policy = _understood(record) if record is not None else None
    return policy[1] if policy is not None else Retention()


class PolicyLog:
    """Reads the recorded policies, and follows their changes.

    Attributes:
        newest: the newest policy of each log, as of the records that `catch_up` has read.
        beyond: number of policies that are ignored because `logs_max` logs already have one.
        losses: seqnums where policies may be lost. Policies before a loss are not enforced until
            they are set again, because a lost record may have replaced them by policies that keep
            more.
    """

    def __init__(self, logs: LogSource, *, logs_max: int) -> None:
        self._log = logs.log(RETENTION_LOG, Session())
        self._logs_max = logs_max
        self._bound: SeqNum = 0
        self.newest: dict[str, Retention] = {}
        self.beyond = 0
        self.losses = Losses(
            "retention policies", "Policies set before are not enforced until they are set again."
        )

    async def wait_for_more(self, wait_s: float) -> None:
        """Wait up to `wait_s` for a record that `catch_up` has not read; `math.inf`: no timer."""
        try:
            await self._log.read_next(bound=self._bound, wait=wait_s)
        except DataLossError:
            return  # `catch_up` logs the error

    async def catch_up(self) -> None:
        """Read new records into `newest`."""
        while True:
            try:
                page = await self._page()
            except DataLossError as error:
                self._bound = self.losses.read_on_after(error, self._bound)
                for log in map(str, error.tags or list(self.newest)):
                    self.newest.pop(log, None)
                continue
            if not page:
                return
            for record in page:
                policy = _understood(record)
                if policy is not None:
                    self._take(*policy)
            self._bound = page[-1].seqnum + 1

    async def _page(self) -> list[Record]:
        try:
            return await self._log.read_range(bound=self._bound)
        except TrimmedError as error:
            self._bound = error.first_seqnum
            return await self._log.read_range(bound=self._bound)

    def _take(self, log: str, retention: Retention) -> None:
        if retention.keeps_all:
            self.newest.pop(log, None)
        elif log in self.newest or len(self.newest) < self._logs_max:
            self.newest[log] = retention
        else:
            self.beyond += 1
            structlog.get_logger().warning(
                "retention not enforced", log=log, reason="retention_logs_max logs have a policy"
            )


def _understood(record: Record) -> tuple[str, Retention] | None:
    try:
        policy = msgspec.json.decode(record.data, type=_Policy)
        retention = checked_retention(policy.log, policy.age_s, policy.size_bytes)
    except (ValueError, InvalidTagError) as error:  # a DecodeError is a ValueError
        structlog.get_logger().error(
            "retention policy not understood", seqnum=record.seqnum, reason=str(error)
        )
        return None
    return policy.log, retention
