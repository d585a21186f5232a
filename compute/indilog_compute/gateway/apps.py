"""The routes of applications and asynchronous invocations: deploy, list, get an outcome.

All handlers call `FunctionHost`; `app.create_gateway` adds the routes.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from indilog.base.deployed import AppInfo
from indilog.base.errors import DeployError
from indilog.base.ids import MAX_SEQNUM
from indilog.link.link_messages import (
    Failed,
    Returned,
    error_from,
)
from indilog.sdk.runs import CHECK_RUNS, holder_of
from indilog_compute.gateway.clients import cancel_if_left
from indilog_compute.gateway.problems import MEDIA_TYPE, problem, problem_of, problem_text
from indilog_compute.gateway.requests import body_of, check_query, decode_json
from indilog_compute.invocations.held_invocations import HOLDERS_PAGE, HeldFor
from indilog_compute.invocations.invocation_list import LISTED_MAX, InvocationFilter
from indilog_compute.invocations.invocation_status import INVOCATION_WAIT_S_MAX, InvocationStatus
from indilog_compute.invocations.states import InvocationState
from indilog_compute.workers.host import FunctionHost

_PYTHON: Final = ("text/x-python", "application/octet-stream")

Owner = Annotated[str, Header(alias="Indilog-Owner", max_length=128)]


class SourcesIn(pydantic.BaseModel):
    """An application's source files: relative path → text."""

    model_config = pydantic.ConfigDict(extra="forbid")

    sources: dict[str, str]


class SourcesBody(msgspec.Struct, forbid_unknown_fields=True):
    """The decoded form of a `SourcesIn`."""

    sources: dict[str, str]


def apps_router(host: FunctionHost, *, body_bytes_max: int) -> APIRouter:
    """Return the routes `/apps` and `/invocations`."""
    router = APIRouter(dependencies=[Depends(check_query)])

    @router.get("/apps", tags=["apps"])
    async def apps() -> Response:
        """List the deployed applications and their functions."""
        return _json({"apps": [msgspec.to_builtins(info) for info in host.apps()]})

    # `:path` accepts slashes, so that a name with a slash is refused as an invalid name, not as an
    # unknown path.
    @router.get("/apps/{app:path}", tags=["apps"])
    async def app_named(app: str) -> Response:
        """Return one application."""
        return _json(msgspec.to_builtins(host.app(app)))

    @router.put("/apps/{app:path}", tags=["apps"], openapi_extra=_DEPLOY_BODY)
    async def deploy_as(app: str, request: Request, owner: Owner = "local") -> Response:
        """Deploy an application under this name; deploying again replaces it, atomically.

        The body is JSON with `sources`, or one file as `text/x-python` or
        `application/octet-stream`.
        """
        sources = await _sources(request, app, body_bytes_max)
        return _deployed(await host.deploy(sources, name=app, owner=owner))

    @router.delete("/apps/{app:path}", tags=["apps"])
    async def undeploy(app: str, owner: Owner = "local") -> Response:
        """Undeploy an application: its services and schedules end, its logs stay.

        Running calls finish. Deploying the application again creates its next version.
        """
        info = await host.undeploy(app, owner=owner)
        left = host.open_invocations(app)
        return _json({"name": info.name, "version": info.version, "invocations_open": left})

    @router.post("/apps", tags=["apps"], openapi_extra=_DEPLOY_BODY)
    async def deploy(request: Request, owner: Owner = "local") -> Response:
        """Deploy an application under the name in its code."""
        sources = await _sources(request, "app", body_bytes_max)
        return _deployed(await host.deploy(sources, owner=owner))

    _add_held(router, host)
    _add_invocations(router, host)
    return router


def _add_held(router: APIRouter, host: FunctionHost) -> None:
    # Before `/invocations/{invocation}`; no id of an invocation is `held`.
    @router.get("/invocations/held", tags=["functions"])
    async def held(log: str | None = None) -> Response:
        """List the first 1,000 workflow runs for which outcomes of calls are held. With `log`, the
        name of a flow's log, list the runs of this flow only. Each run has the number of its held
        calls and their bytes. `has_more` says whether there may be further runs.
        """
        found = await host.held("" if log is None else holder_of(log, ""))
        has_more = len(found) == HOLDERS_PAGE
        return _json({"held": [_held(one) for one in found], "has_more": has_more})

    @router.delete("/invocations/held", tags=["functions"])
    async def release(log: str, run: str = "") -> Response:
        """Release the outcomes that are held for all runs of a flow, or for its run `run`. `log` is
        the name of the flow's log. Released outcomes are kept for `results_kept_s` at most. If a
        run continues later, it calls the function again.
        """
        if not run:
            return _json({"released": await host.release_held(holder_of(log, ""))})
        calls = [one for one in await host.held(holder_of(log, run)) if one.run == (log, run)]
        host.release(holder_of(log, run), ())
        return _json({"released": sum(one.calls for one in calls)})


def _held(one: HeldFor) -> dict[str, Any]:
    log, run = one.run
    return {"log": log, "run": run, "calls": one.calls, "bytes": one.size}


def _add_invocations(router: APIRouter, host: FunctionHost) -> None:
    @router.get("/invocations", tags=["functions"])
    async def invocations(
        app: str | None = None,
        function: str | None = None,
        state: InvocationState | None = None,
        limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
        page: Annotated[int | None, Query(ge=0, le=MAX_SEQNUM)] = None,
    ) -> Response:
        """List the recorded invocations that are open or kept, newest first: of one application, of
        one function (`app.function`), or all. `next` of an answer is `page` of the next request;
        null: there are no further invocations.
        """
        found = await host.newest_invocations(
            InvocationFilter(app, function, state, page), limit + 1
        )
        following = found[limit - 1].seqnum if len(found) > limit else None
        return _json({"invocations": found[:limit], "next": following})

    @router.get("/invocations/{invocation}", tags=["functions"])
    async def outcome(
        invocation: str,
        request: Request,
        wait: Annotated[float, Query(ge=0, le=INVOCATION_WAIT_S_MAX, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Return the state of an asynchronous invocation, and its outcome if it has ended. With
        `wait`, wait up to that many seconds for the outcome.
        """
        asked = host.invocation(invocation, wait_s=wait)
        found = await (cancel_if_left(request.receive, asked) if wait else asked)
        if found is None:
            return _not_found(
                f"No invocation {invocation!r} is known: it never existed, or its outcome is "
                f"deleted (kept for {host.results_kept_s:,.10g} s at most, results_kept_s)."
            )
        return _invocation(found)

    @router.delete("/invocations/{invocation}", tags=["functions"])
    async def cancel(invocation: str) -> Response:
        """Cancel an asynchronous invocation, durably.

        A waiting invocation never begins; a running invocation is asked to stop. The answer is the
        same as for GET. An invocation that has already ended does not change; the answer is 409.
        """
        before = await host.invocation(invocation)
        if before is not None and before.outcome is not None:
            sentence = f"Invocation {invocation} has already ended: {before.state.value}."
            return _problem(HTTPStatus.CONFLICT, sentence)
        found = await host.cancel_invocation(invocation)
        if found is None:
            return _not_found(f"No invocation {invocation!r} is known; there is none to cancel.")
        return _invocation(found)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    text = msgspec.json.encode(value)
    return Response(text, status_code=int(status), media_type="application/json")


def _not_found(detail: str) -> Response:
    return _problem(HTTPStatus.NOT_FOUND, detail)


def _problem(status: HTTPStatus, detail: str) -> Response:
    details = problem(status, detail)
    return Response(problem_text(details), status_code=details.status, media_type=MEDIA_TYPE)


def _deployed(info: AppInfo) -> Response:
    return _json(
        {
            "name": info.name,
            "version": info.version,
            "functions": [function.name for function in info.functions],
            "has_runs": any(operation.name == CHECK_RUNS for operation in info.operations),
        }
    )


def _invocation(found: InvocationStatus) -> Response:
    value: dict[str, Any] = {
        "invocation": found.id,
        "function": found.function,
        "state": found.state.value,
    }
    match found.outcome:
        case Returned(result=result):
            value["result"] = msgspec.Raw(result)
        case Failed():
            value["problem"] = problem_of(error_from(found.outcome))
        case None:
            return _json(value)
    answer = _json(value)
    answer.headers["Indilog-Position"] = str(found.outcome.position)
    return answer


async def _sources(request: Request, app: str, bytes_max: int) -> dict[str, str]:
    body = await body_of(request, bytes_max)
    if request.headers.get("content-type", "").split(";")[0] in _PYTHON:
        try:
            return {f"{app}.py": body.decode()}
        except UnicodeDecodeError as error:
            raise DeployError(f"The file is not UTF-8 text: {error}.") from error
    return decode_json(SourcesBody, SourcesIn, body, not_done="Nothing was deployed").sources


_DEPLOY_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": SourcesIn.model_json_schema()},
            "text/x-python": {"schema": {"type": "string"}},
        },
    }
}
