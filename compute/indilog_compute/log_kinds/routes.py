"""The routes `/logs`: create a log of some kind, list the created logs."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Request, Response

from indilog.base.log_kinds import SHARED
from indilog_compute.gateway.requests import SMALL_BYTES_MAX, body_of, check_query, parse_json
from indilog_compute.log_kinds.kinds import LogKinds


class LogIn(pydantic.BaseModel):
    """A log to create."""

    model_config = pydantic.ConfigDict(extra="forbid")

    log: str
    kind: str = SHARED


def catalog_router(kinds: LogKinds) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/logs", tags=["logs"], dependencies=[Depends(check_query)])

    @router.get("")
    async def logs() -> Response:
        """List the created logs. A log that no call created is not listed; its kind is shared."""
        created = await kinds.created()
        return _json({"logs": [msgspec.to_builtins(info) for info in created]})

    @router.post("", status_code=HTTPStatus.CREATED, openapi_extra=_BODY)
    async def create(request: Request) -> Response:
        """Create a log of a kind: `shared`, `object-store` or `order-first`. Creating it again is
        harmless.
        """
        body = await body_of(request, SMALL_BYTES_MAX)
        given = parse_json(LogIn, body, not_done="No log was created")
        info = await kinds.create(given.log, given.kind)
        return _json(msgspec.to_builtins(info), HTTPStatus.CREATED)

    return router


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": LogIn.model_json_schema()}},
    }
}


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    content = msgspec.json.encode(value)
    return Response(content, status_code=int(status), media_type="application/json")
