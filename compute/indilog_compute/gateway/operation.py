"""The routes for operators: health, readiness, status, metrics, and the nodes of the cluster.

`app.create_gateway` adds the routes. `MembershipService` is implemented by the cluster's runtime;
`OneProcess` takes its place in a platform of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.exposition import exposition
from indilog.base.ids import MetalogPosition
from indilog_compute.gateway.problems import MEDIA_TYPE, problem_of, problem_text
from indilog_compute.gateway.readiness import AppendProbe
from indilog_compute.gateway.requests import body_of, check_query, parse_json
from indilog_compute.workers.host import FunctionHost

_BODY_BYTES_MAX: Final = 4096


class HostCollector(Collector):
    """Reads the function host's metrics when Prometheus scrapes."""

    def __init__(self, host: FunctionHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per counter or gauge."""
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
        means that appends of this compute node fail, because a disk that its shard needs is full.
        The HTTP status is still 200, because reads are served. If all shards need that disk,
        appends fail at all compute nodes. A `warning` means that some records are permanently lost;
        everything else is served.
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


class MembershipService(Protocol):
    """Shows and changes the nodes of a cluster.

    Each method returns the state of the cluster. `wanted` are the nodes that the cluster is to
    have, and `installed` the nodes that it has; `view` is the number of the installed view.
    `reached` says whether the wanted nodes are installed. `missing` has a sentence for each step
    that remains.

    Raises:
        ConfigError: the cluster does not allow this change; nothing was changed.
        QuorumUnavailableError: the metadata store does not answer.
    """

    async def state(self) -> dict[str, Any]:
        """Return the state."""

    async def scale(self, counts: object) -> dict[str, Any]:
        """Change how many nodes of each kind the cluster is to have."""

    async def drain(self, node: str) -> dict[str, Any]:
        """Let one compute node or storage node leave."""

    async def finalize(self, shard: int, cuts: int) -> dict[str, Any]:
        """Let a shard get no further records after `cuts` more committed cuts."""

    async def rebalance(self) -> dict[str, Any]:
        """Spread the replicas of shards evenly over storage nodes and zones."""

    async def replace(self, name: str) -> dict[str, Any]:
        """Replace all nodes of a process that is gone permanently by other nodes."""


class ScaleIn(pydantic.BaseModel):
    """How many nodes the cluster is to have; a number that is left out stays as it is."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    nodes: int | None = None
    compute_nodes: int | None = None
    storage_nodes: int | None = None
    index_shards: int | None = None
    index_replicas: int | None = None
    aggregators: int | None = None


class FinalizeIn(pydantic.BaseModel):
    """The number of committed cuts after which a shard gets no further records; 0: at once."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    cuts: int = pydantic.Field(default=10, ge=0, le=1_000_000)


class OneProcess:
    """Answers for a platform that runs in one process: its nodes cannot change while it runs."""

    async def state(self) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    async def scale(self, _counts: object) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    async def drain(self, _node: str) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    async def finalize(self, _shard: int, _cuts: int) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    async def rebalance(self) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    async def replace(self, _name: str) -> dict[str, Any]:
        """Refuse."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "This platform runs in one process, so its nodes cannot change while it runs; a new "
            "cluster that is started with `indilog up --processes` can."
        )


def _body_of(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the part of a route's OpenAPI description that describes the request body."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def members_router(members: MembershipService) -> APIRouter:
    """Return the routes below `/cluster`, which show and change the nodes of the cluster."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(check_query)])

    @router.get("/cluster/members")
    async def state() -> dict[str, Any]:
        """Return which nodes the cluster is to have (`wanted`), which it has (`installed`, as of
        the `view`), and what is `missing`.
        """
        return await members.state()

    @router.put("/cluster/members", openapi_extra=_body_of(ScaleIn))
    async def scale(request: Request) -> dict[str, Any]:
        """Change how many nodes the running cluster is to have; omitted numbers do not change.

        The answer comes at once; the cluster then changes by itself. Nodes with the greatest
        numbers leave first. Repeating the request is harmless.
        """
        body = await body_of(request, _BODY_BYTES_MAX)
        given = parse_json(ScaleIn, body, not_done="Nothing was changed")
        return await members.scale(given.model_dump())

    @router.delete("/cluster/members/{node}")
    async def drain(node: str) -> dict[str, Any]:
        """Let one compute node or storage node leave the running cluster.

        The answer comes at once. A storage node leaves when other nodes have copies of all its
        records. Repeating the request is harmless while the node leaves.
        """
        return await members.drain(node)

    @router.post("/cluster/shards/{shard}/finalize", openapi_extra=_body_of(FinalizeIn))
    async def finalize(shard: int, request: Request) -> dict[str, Any]:
        """Let a shard get no further records after `cuts` more committed cuts, or after 5 s.

        The answer comes at once. The compute node of the shard then continues on a new shard.
        Repeating the request does not extend the time. A request with 0 cuts ends it at once.
        """
        body = await body_of(request, _BODY_BYTES_MAX)
        given = parse_json(FinalizeIn, body, not_done="Nothing was changed")
        return await members.finalize(shard, given.cuts)

    @router.post("/cluster/members/{node}/replace")
    async def replace(node: str) -> dict[str, Any]:
        """Let other nodes take the place of all nodes of a process that is gone permanently.

        The answer comes at once. The process is ended if it runs, and not started again.
        """
        return await members.replace(node)

    @router.post("/cluster/rebalance")
    async def rebalance() -> dict[str, Any]:
        """Let the replicas of shards be spread evenly over storage nodes and zones.

        The answer comes at once; records are then copied, at most `repair_bytes_per_s` at each
        node. Repeating the request is harmless.
        """
        return await members.rebalance()

    return router
