"""How the services of the deployed applications are, over all workers of this compute node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from indilog_compute.workers.call import Deployed
from indilog_compute.workers.process import WorkerProcess


def services_told(
    workers: Iterable[WorkerProcess], apps: Iterable[Deployed]
) -> dict[str, dict[str, Any]]:
    """Return, by `app.service`, in how many workers it runs, waits to be started again or has
    ended, how often it failed there, and the problem of one of them.
    """
    names = {app.number: app.record for app in apps}
    told: dict[str, dict[str, Any]] = {
        f"{record.name}.{service}": {
            "running": 0, "waiting": 0, "ended": 0, "failures": 0, "problem": "",
        }
        for record in names.values()
        for service in record.services
    }  # fmt: skip
    for worker in workers:
        for state in worker.services:
            record = names.get(state.deployment)
            figures = told.get(f"{record.name}.{state.name}") if record is not None else None
            if figures is not None:
                figures[state.state] += 1
                figures["failures"] += state.failures
                figures["problem"] = state.problem or figures["problem"]
    return told
