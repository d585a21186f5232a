"""The routes for monitoring: health, readiness, status, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indilog.base.errors import NotReadyError
from indilog.base.ids import MetalogPosition
from indilog.base.telemetry import exposition
from indilog_compute.gateway.problems import MEDIA_TYPE, problem_of, problem_text
from indilog_compute.gateway.readiness import AppendProbe
from indilog_compute.workers.host import FunctionHost


class HostCollector(Collector):
    """Reads the function host's metrics when Prometheus scrapes."""

    def __init__(self, host: FunctionHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per number."""
        status = self._host.status()
        calls = CounterMetricFamily(
            "indilog_function_calls",
            "Function calls that have ended, by outcome",
            labels=("outcome",),
        )
        for outcome, count in status["calls"].items():
            calls.add_metric((outcome,), count)
        yield calls
        yield CounterMetricFamily(
            "indilog_worker_restarts",
            "Worker processes started to replace one that ended",
            value=status["worker_restarts"],
        )
        yield CounterMetricFamily(
            "indilog_calls_moved",
            "Function calls moved to another worker before they began",
            value=status["calls_moved"],
        )
        invocations = status["invocations"]
        yield CounterMetricFamily(
            "indilog_invocations_rerun",
            "Recorded invocations that this node ran again after their executor failed",
            value=invocations["rerun"],
        )
        for name, documentation, value in (
            (
                "indilog_invocations_open",
                "Recorded invocations that have not ended",
                invocations["open"],
            ),
            ("indilog_calls_running", "Function calls that run", status["calls_running"]),
            ("indilog_calls_waiting", "Calls that wait for a worker", status["calls_waiting"]),
            ("indilog_workers", "Worker processes that are up", len(status["workers"])),
        ):
            yield GaugeMetricFamily(name, documentation, value=value)


def operation_router(
    host: FunctionHost,
    status: Callable[[], dict[str, Any]],
    registry: CollectorRegistry,
    probe: AppendProbe,
) -> APIRouter:
    """Return the routes `/livez`, `/readyz`, `/status` and `/metrics`."""
    router = APIRouter(tags=["operation"])

    @router.get("/healthz", include_in_schema=False)  # former name of /livez
    @router.get("/livez")
    async def livez() -> dict[str, str]:
        """Answer at once, which shows that the process runs."""
        return {"status": "alive"}

    @router.get("/readyz")
    async def readyz() -> Response:
        """Tell whether the node serves calls, reads and appends now.

        To find out, the gateway appends a record, at most once a second. The state `read-only`
        means that a disk is full, so appends fail; the HTTP status is still 200, because reads are
        served. If all shards share that disk, appends fail at all compute nodes. A `warning` means
        that some records are permanently lost; everything else is served.
        """
        now = status()
        failure = None if now.get("ready", True) else "The platform is starting or recovering."
        if failure is None and not now.get("read_only"):
            failure = await probe.failure()
        if failure is None:
            how = "read-only" if now.get("read_only") else "ready"
            warning = {"warning": now["warning"]} if "warning" in now else {}
            return JSONResponse({"status": how, **warning})
        details = problem_of(NotReadyError(f"{failure} Try again."))
        return Response(
            problem_text(details),
            status_code=int(HTTPStatus.SERVICE_UNAVAILABLE),
            media_type=MEDIA_TYPE,
        )

    @router.get("/status")
    async def platform_status() -> Response:
        """Return the tiers' state and counters, and the function host's under `functions`."""
        whole = {**status(), "functions": host.status()}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return the metrics in Prometheus's text format."""
        return Response(exposition(registry), media_type="text/plain; version=0.0.4")

    return router


def snapshots_router(request_snapshots: Callable[[], MetalogPosition]) -> APIRouter:
    """Return the route `/index/snapshots`."""
    router = APIRouter(tags=["operation"])

    @router.post("/index/snapshots", status_code=HTTPStatus.ACCEPTED)
    async def snapshots() -> dict[str, int]:
        """Ask every index node to write a snapshot of its index below the returned metalog
        `position`. The snapshots are written later; for each index node, `/status` shows the end of
        its newest snapshot as `snapshot_position`. Repeating the request is harmless.
        """
        return {"position": request_snapshots()}

    return router
