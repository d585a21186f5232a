"""The routes `/logs`: create a log of some kind, switch its kind, list the logs."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Request, Response

from indilog.base.log_kinds import SHARED
from indilog_compute.gateway.requests import SMALL_BYTES_MAX, body_of, check_query, parse_json
from indilog_compute.log_kinds.kinds import LogKinds


class LogIn(pydantic.BaseModel):
    """The body of a creation: the name of the log, its kind, and the number of its stripes."""

    model_config = pydantic.ConfigDict(extra="forbid")

    log: str
    kind: str = SHARED
    stripes: int | None = None


class KindIn(pydantic.BaseModel):
    """The body of a switch: the new kind of the log, and the number of its stripes."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: str
    stripes: int | None = None


def catalog_router(kinds: LogKinds) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/logs", tags=["logs"], dependencies=[Depends(check_query)])

    @router.get("")
    async def logs() -> Response:
        """List the logs that were created or switched. Every other log is of kind `shared`."""
        created = await kinds.created()
        return _json({"logs": [msgspec.to_builtins(info) for info in created]})

    @router.post("", status_code=HTTPStatus.CREATED, openapi_extra=_body(LogIn))
    async def create(request: Request) -> Response:
        """Create a log of a kind: `shared`, `object-store`, `order-first` or `owned`. Creating it
        again is harmless.
        """
        body = await body_of(request, SMALL_BYTES_MAX)
        given = parse_json(LogIn, body, not_done="No log was created")
        info = await kinds.create(given.log, given.kind, stripes=given.stripes)
        return _json(msgspec.to_builtins(info), HTTPStatus.CREATED)

    @router.post("/{log:path}/switch", openapi_extra=_body(KindIn))
    async def switch(log: str, request: Request) -> Response:
        """Continue a log as one of another kind, or with other stripes, while it is used."""
        body = await body_of(request, SMALL_BYTES_MAX)
        given = parse_json(KindIn, body, not_done="The log was not switched")
        info = await kinds.switch(log, given.kind, stripes=given.stripes)
        return _json(msgspec.to_builtins(info))

    return router


def _body(model: type[pydantic.BaseModel]) -> dict[str, object]:
    schema = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": schema}}


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    content = msgspec.json.encode(value)
    return Response(content, status_code=int(status), media_type="application/json")
