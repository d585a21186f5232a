"""The service of one compute node that enforces retention policies, round after round.

Each compute node has a service, but only the service of the first compute node in the newest view
enforces policies, by `RetentionRounds`. This service follows the log of the policies. While no log
has a policy, it waits for the next record without a timer. Every other service checks once per
`retention_interval_s` whether its node is first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Final

import structlog

from indilog.base.errors import IndilogError
from indilog.base.log import LogSource
from indilog.config import NodeConfig
from indilog.sdk.retention_log import PolicyLog
from indilog_compute.retention import RetentionRounds

_PAUSE_S: Final = 1.0
"""Seconds between two rounds; the pause doubles after each error, up to `retention_interval_s`."""


class RetentionService:
    """Enforces the policies of logs of kind `shared`, the default, through one compute node.

    Args:
        logs: the logs, through this compute node.
        config: the settings of the node.
        serves: returns whether this compute node enforces policies now.
        routes: returns the names of the logs that `LogKinds` (`indilog_compute.log_kinds`) serves.
            This service skips their policies, because `LogKinds` enforces them.
    """

    def __init__(
        self,
        logs: LogSource,
        config: NodeConfig,
        serves: Callable[[], bool],
        routes: Callable[[], Container[str]] = tuple,
    ) -> None:
        self.serves = serves
        self._routes = routes
        self._interval_s = config.trims.retention_interval_s
        self._policies = PolicyLog(logs, logs_max=config.trims.retention_logs_max)
        self._rounds = RetentionRounds(logs, config, asyncio.sleep)
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Enforce policies from now on."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop; a trim in flight may still take effect."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def status(self) -> dict[str, object]:
        """Return the status for operators and metrics."""
        return {**self._rounds.status(), "policies_beyond_the_limit": self._policies.beyond}

    async def _run(self) -> None:
        pause_s = min(_PAUSE_S, self._interval_s)
        rest_s = pause_s
        while True:
            if not self.serves():
                await asyncio.sleep(self._interval_s)
                continue
            try:
                await self._policies.catch_up()
                routes, newest = self._routes(), self._policies.newest
                own = {log: policy for log, policy in newest.items() if log not in routes}
                self._rounds.take(own)
                is_more = bool(own) and await self._rounds.run()
                if not is_more:
                    await self._rest()
                rest_s = pause_s
            except IndilogError as error:
                structlog.get_logger().warning("retention not enforced", reason=str(error))
                rest_s = min(2 * rest_s, self._interval_s)
            except Exception:  # noqa: BLE001 - outermost: the next round may succeed
                structlog.get_logger().exception("retention failed")
                rest_s = min(2 * rest_s, self._interval_s)
            await asyncio.sleep(rest_s)

    async def _rest(self) -> None:
        """Wait for the next round, or until a policy is set."""
        wait_s = self._interval_s if self._policies.newest else math.inf
        await self._policies.wait_for_more(wait_s)
