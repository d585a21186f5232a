"""The state of the services of deployed applications, over all workers of a compute node.

`FunctionHost.status` returns it. Before `FunctionHost` ends a worker, it waits until the worker's
services have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Final

from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.process import Worker

_LOOK_S: Final = 0.01


async def until_services_end(workers: Collection[Worker], *, within_s: float) -> None:
    """Wait until all services of these workers have ended, at most `within_s` seconds. The caller
    has told the workers to run no services.

    A cancelled service may still write to the log; for example, a driver of BokiFlow records that
    it leaves.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while any(worker.services and not worker.link.is_lost for worker in workers):  # noqa: ASYNC110 - several workers report
                await asyncio.sleep(_LOOK_S)


def service_states(
    workers: Iterable[Worker], apps: Iterable[DeployedApp]
) -> dict[str, dict[str, Any]]:
    """Return the state of each service, by `app.service`.

    A state has the numbers of workers in which the service runs (`running`), waits for a restart
    (`waiting`) and has ended (`ended`). It also has the number of the service's failures in all
    workers, and its problem in one of the workers.
    """
    names = {app.number: app.record for app in apps}
    states: dict[str, dict[str, Any]] = {
        f"{record.name}.{service}": {
            "running": 0, "waiting": 0, "ended": 0, "failures": 0, "problem": "",
        }
        for record in names.values()
        for service in record.services
    }  # fmt: skip
    for worker in workers:
        for state in worker.services:
            record = names.get(state.deployment)
            counted = states.get(f"{record.name}.{state.name}") if record is not None else None
            if counted is not None:
                counted[state.state] += 1
                counted["failures"] += state.failures
                counted["problem"] = state.problem or counted["problem"]
    return states
