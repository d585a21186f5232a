"""The state of the services of deployed applications, over all workers of a compute node.

`FunctionHost.status` returns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.process import Worker


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
