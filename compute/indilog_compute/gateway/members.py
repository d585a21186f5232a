"""The routes below `/cluster/members`: which nodes the cluster has and is to have."""

from __future__ import annotations

from typing import Any, Final, Protocol

import pydantic
from fastapi import APIRouter, Depends, Request

from indilog.base.errors import ConfigError
from indilog_compute.gateway.requests import body_of, check_query, parse_json

_BODY_BYTES_MAX: Final = 4096


class ClusterMembers(Protocol):
    """Shows and changes the nodes of a cluster. Each method returns its state: `wanted` and
    `installed` nodes, the number of the installed `view`, whether it is `reached`, and what is
    still `missing`, in sentences.

    Raises:
        ConfigError: the cluster cannot be changed so; nothing was changed.
        QuorumUnavailableError: the metadata store does not answer.
    """

    async def state(self) -> dict[str, Any]:
        """Return the state."""

    async def scale(self, counts: object) -> dict[str, Any]:
        """Change how many nodes of each kind the cluster is to have."""

    async def drain(self, node: str) -> dict[str, Any]:
        """Let one compute node or storage node leave."""


class CountsIn(pydantic.BaseModel):
    """How many nodes the cluster is to have; a number that is left out stays as it is."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    compute_nodes: int | None = None
    storage_nodes: int | None = None
    index_shards: int | None = None
    index_replicas: int | None = None
    aggregators: int | None = None


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

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "This platform runs in one process, so its nodes cannot change while it runs; a new "
            "cluster that is started with `indilog up --processes` can."
        )


def members_router(members: ClusterMembers) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(check_query)])

    @router.get("/cluster/members")
    async def state() -> dict[str, Any]:
        """Return which nodes the cluster is to have (`wanted`), which it has (`installed`, as of
        the `view`), and what is `missing`.
        """
        return await members.state()

    @router.put("/cluster/members", openapi_extra=_COUNTS_BODY)
    async def scale(request: Request) -> dict[str, Any]:
        """Change how many nodes the running cluster is to have. Numbers that are left out stay.

        The answer comes at once; the cluster then changes by itself. Nodes with the greatest
        numbers leave first. Repeating the request is harmless.
        """
        body = await body_of(request, _BODY_BYTES_MAX)
        given = parse_json(CountsIn, body, not_done="Nothing was changed")
        return await members.scale(given.model_dump())

    @router.delete("/cluster/members/{node}")
    async def drain(node: str) -> dict[str, Any]:
        """Let one compute node or storage node leave the running cluster.

        The answer comes at once. A storage node leaves when other nodes have copies of all its
        records. Repeating the request is harmless while the node leaves.
        """
        return await members.drain(node)

    return router


_COUNTS_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CountsIn.model_json_schema()}},
    }
}
