"""The routes below `/runs`, which show and change the workflow runs of all applications.

An application has runs if it has the operations `runs.*` (`indilog.sdk.runs`), which a workflow
library adds. The platform knows these operations, but no workflow library. `RunRoutes` runs them by
`OperationCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from indilog.base.errors import InvalidArgumentsError, NotFoundError
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import LogSource
from indilog.sdk.runs import (
    LIST_RUNS,
    MOVE_RUNS,
    RUNS_MAX,
    SHOW_RUN,
    START_RUN,
    STEPS_SHOWN,
    STEPS_SHOWN_MAX,
    RunPage,
    RunPlace,
    cursor_of,
    merged,
    place_of,
    with_app,
)
from indilog_compute.gateway.clients import SHARE, cancel_if_left
from indilog_compute.gateway.records import WAIT_S_MAX
from indilog_compute.gateway.requests import body_of, check_query
from indilog_compute.gateway.runs.events import EventStream
from indilog_compute.gateway.runs.operations import OperationAnswer, OperationCalls
from indilog_compute.gateway.runs.results import wait_for_result
from indilog_compute.workers.host import FunctionHost

_APPS_AT_ONCE: Final = 32
"""Largest number of applications that one request asks at the same time."""
_UNPROCESSABLE: Final = 422

Position = Annotated[int, Header(alias="Indilog-Position", ge=0)]


class StartIn(pydantic.BaseModel):
    """A workflow and its arguments. If there is a run with the `id`, nothing is started."""

    model_config = pydantic.ConfigDict(extra="forbid")

    workflow: str
    arguments: dict[str, Any] | None = None
    id: str | None = None


class ForkIn(pydantic.BaseModel):
    """The step from which a new run continues: its number or its name."""

    model_config = pydantic.ConfigDict(extra="forbid")

    step: str


class SignalIn(pydantic.BaseModel):
    """A signal. Of several signals with one `key`, only the first takes effect."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str
    value: Any = True
    key: str | None = None


class MoveIn(pydantic.BaseModel):
    """The deployment whose code a run continues with; null: the newest one."""

    model_config = pydantic.ConfigDict(extra="forbid")

    version: int | None = None


class MoveAllIn(MoveIn):
    """The deployment, and the selection of the runs that move to its code."""

    workflow: str | None = None
    state: str = "running"
    id_prefix: str = ""
    older_s: float | None = None
    newer_s: float | None = None
    from_version: int | None = None
    limit: int = 100
    page: str | None = None


class QueryIn(pydantic.BaseModel):
    """A query and its arguments, or the name or number of a step. If `name` is empty: the status
    that the workflow has set.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = ""
    arguments: dict[str, Any] | None = None


class RunRoutes:
    """The handlers of the routes.

    Args:
        host: knows the deployed applications.
        operations: runs operations of the applications.
        logs: the logs of this node, in which the routes wait for records of runs.
        answer_s: seconds within which each application must answer if several are asked.
        body_bytes_max: largest body of a request.
    """

    def __init__(
        self,
        host: FunctionHost,
        operations: OperationCalls,
        logs: LogSource,
        *,
        answer_s: float,
        body_bytes_max: int,
    ) -> None:
        self._logs = logs
        self._host = host
        self._operations = operations
        self._answer_s = answer_s
        self._body_bytes_max = body_bytes_max

    async def list_runs(
        self,
        request: Request,
        *,
        app: str | None = None,
        workflow: str | None = None,
        state: str | None = None,
        id: str | None = None,  # noqa: A002 - the query's field
        id_prefix: str | None = None,
        older_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
        newer_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
        version: Annotated[int | None, Query(ge=1)] = None,
        limit: Annotated[int, Query(ge=1, le=RUNS_MAX)] = 100,
        page: str | None = None,
        position: Position = 0,
    ) -> Response:
        """List workflow runs, newest first, of one application or of all applications.

        The runs are ordered by their starts; `older_s` and `newer_s` are seconds since the start of
        a run. With `state` done, failed or cancelled, the order and these seconds are by the end of
        a run. `version` is the version of the deployment with whose code a run continues or ended.
        `next` of an answer is `page` of the next request; null: there are no further runs. A page
        may be short although there are further runs. `not_answered` has the applications whose runs
        are missing, and the reasons.
        """
        arguments = {
            "workflow": workflow,
            "state": state,
            "id": id,
            "id_prefix": id_prefix,
            "older_s": older_s,
            "newer_s": newer_s,
            "version": version,
            "limit": limit,
            "before": _place_in(page),
        }
        text = msgspec.json.encode({k: v for k, v in arguments.items() if v is not None})
        if app is not None:
            self._check_has_runs(app)
        apps = [app] if app is not None else self._apps_with_runs()
        answers = await cancel_if_left(request.receive, self._ask(apps, text, position))
        for answer in answers.values():
            if answer.is_failure and (app is not None or answer.status == _UNPROCESSABLE):
                return answer.response()  # the question is wrong
        return self._merged(apps, answers, limit)

    async def start(self, app: str, request: Request, position: Position = 0) -> Response:
        """Start a run of a workflow; return its id. The run is durable when the answer arrives.

        If there is a run with the given `id`, nothing is started. So a start can be repeated.
        """
        given = await self._fields(request)
        return await self._operate(app, START_RUN, given, request, position)

    async def result(
        self,
        app: str,
        run: str,
        request: Request,
        wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, allow_inf_nan=False)] = 0.0,
        position: Position = 0,
    ) -> Response:
        """Return how a run ended: its `state`, `result` and `problem`. With `wait`, the request
        waits up to that many seconds for the end; afterwards the state is that of an open run.
        """
        self._check_has_runs(app)
        waiting = wait_for_result(
            self._operations, self._logs, app=app, run=run, wait_s=wait, position=position
        )
        return await cancel_if_left(request.receive, waiting)

    async def show(
        self,
        app: str,
        run: str,
        request: Request,
        steps: Annotated[int, Query(ge=0, le=STEPS_SHOWN_MAX)] = STEPS_SHOWN,
        round_: Annotated[int | None, Query(alias="round", ge=1)] = None,
        position: Position = 0,
    ) -> Response:
        """Return one run: its state, its last steps, what it waits for, and what to do about it.

        `round`: the round of a run that continues as new; default: the current one.
        """
        wanted = {"id": run, "steps": steps} | ({} if round_ is None else {"round": round_})
        return await self._operate(app, SHOW_RUN, wanted, request, position)

    async def events(
        self,
        app: str,
        run: str,
        request: Request,
        *,
        after: Annotated[int, Query(ge=-1, le=MAX_SEQNUM)] = -1,
        last_event_id: Annotated[int | None, Header(ge=-1, le=MAX_SEQNUM)] = None,
        position: Position = 0,
    ) -> Response:
        """Stream the events of a run as server-sent events: each event that the workflow published,
        and each change of its state. Existing events come first, then new events. The stream ends
        with the run.

        A client that reconnects with `Last-Event-ID` continues after that event, as with `after`.
        """
        self._check_has_runs(app)
        stream = EventStream(
            self._operations,
            self._logs,
            app=app,
            run=run,
            after=after if last_event_id is None else last_event_id,
            position=position,
        )
        first = await cancel_if_left(request.receive, stream.ask())
        if first.is_failure:
            return first.response()
        return StreamingResponse(
            stream.text(first, request.scope[SHARE]),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    async def cancel(
        self, app: str, run: str, request: Request, position: Position = 0
    ) -> Response:
        """Cancel a run: its next operation raises `Cancelled`. A repeated request is harmless."""
        return await self._act(app, run, "cancel", request, position)

    async def retry(self, app: str, run: str, request: Request, position: Position = 0) -> Response:
        """Execute a parked run again now, with the code that is deployed."""
        return await self._act(app, run, "retry", request, position)

    async def fork(self, app: str, run: str, request: Request, position: Position = 0) -> Response:
        """Start a new run that continues from a `step` of this run, with the deployed code."""
        return await self._act(app, run, "fork", request, position)

    async def move(self, app: str, run: str, request: Request, position: Position = 0) -> Response:
        """Continue a run with the code of another deployment, if this code fits its history."""
        return await self._act(app, run, "move", request, position)

    async def move_all(self, app: str, request: Request, position: Position = 0) -> Response:
        """Continue the open runs that the body selects with the code of another deployment. The
        answer has the ids of the runs that move, and the reasons why other runs are refused. `next`
        is `page` of the next request; null: there are no further runs.
        """
        given = await self._fields(request)
        return await self._operate(app, MOVE_RUNS, given, request, position)

    async def signal(
        self, app: str, run: str, request: Request, position: Position = 0
    ) -> Response:
        """Send a signal to a run. The signal is durable when the answer arrives."""
        return await self._act(app, run, "signal", request, position)

    async def query(self, app: str, run: str, request: Request, position: Position = 0) -> Response:
        """Ask a run for a value."""
        return await self._act(app, run, "query", request, position)

    # --- internal

    def _merged(
        self, apps: list[str], answers: Mapping[str, OperationAnswer], limit: int
    ) -> Response:
        """Return the first runs of all applications that answered, and the names of the other
        applications.
        """
        pages: list[RunPage] = []
        not_answered: dict[str, str] = {}
        for app in apps:
            if (answer := answers.get(app)) is None:
                not_answered[app] = f"App {app} did not answer within {self._answer_s:g} s."
            elif answer.is_failure:
                not_answered[app] = answer.detail
            else:
                pages.append(with_app(msgspec.json.decode(answer.body, type=RunPage), app))
        page = merged(pages, limit)
        found: dict[str, Any] = {
            "runs": page.runs,
            "next": page.next and cursor_of(page.next),
            "not_answered": not_answered,
        }
        seen = max((answer.position for answer in answers.values()), default=0)
        return Response(
            msgspec.json.encode(found),
            media_type="application/json",
            headers={"Indilog-Position": str(seen)} if seen else {},
        )

    async def _ask(
        self, apps: list[str], arguments: bytes, position: int
    ) -> Mapping[str, OperationAnswer]:
        """Return the answers of the applications that answered within `answer_s` seconds."""
        slots = asyncio.Semaphore(_APPS_AT_ONCE)

        async def one(app: str) -> OperationAnswer:
            async with slots:
                return await self._operations.run(app, LIST_RUNS, arguments, position=position)

        tasks = {app: asyncio.ensure_future(one(app)) for app in apps}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=self._answer_s)
            return {app: task.result() for app, task in tasks.items() if task.done()}
        finally:
            late = [task for task in tasks.values() if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _act(
        self, app: str, run: str, action: str, request: Request, position: int
    ) -> Response:
        given = await self._fields(request)
        if "id" in given:
            raise InvalidArgumentsError(
                "Nothing was done: the path names the run; leave the field 'id' out.",
                [{"field": "id", "problem": "is in the path"}],
            )
        return await self._operate(app, f"runs.{action}", {**given, "id": run}, request, position)

    async def _fields(self, request: Request) -> dict[str, msgspec.Raw]:
        """Return the fields of the body.

        Raises:
            InvalidArgumentsError: the body is not a JSON object.
        """
        body = await body_of(request, self._body_bytes_max)
        try:
            return msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InvalidArgumentsError(
                "Nothing was done: the body is a JSON object.",
                [{"field": "body", "problem": "is a JSON object"}],
            ) from None

    async def _operate(
        self, app: str, operation: str, arguments: object, request: Request, position: int
    ) -> Response:
        self._check_has_runs(app)
        text = msgspec.json.encode(arguments)
        asked = self._operations.run(app, operation, text, position=position)
        return (await cancel_if_left(request.receive, asked)).response()

    def _apps_with_runs(self) -> list[str]:
        return [
            info.name
            for info in self._host.apps()
            if any(operation.name == LIST_RUNS for operation in info.operations)
        ]

    def _check_has_runs(self, app: str) -> None:
        """Check that an application is deployed and has workflows.

        Raises:
            UnknownFunctionError: the application is not deployed.
            NotFoundError: the application has no workflows.
        """
        info = self._host.app(app)
        if not any(operation.name == LIST_RUNS for operation in info.operations):
            raise NotFoundError(
                f"The deployed version of app {app} has no workflows. If an earlier version had "
                "some, their runs wait until a version with a Flow is deployed."
            )


def runs_router(
    host: FunctionHost,
    operations: OperationCalls,
    logs: LogSource,
    *,
    answer_s: float,
    body_bytes_max: int,
) -> APIRouter:
    """Return the routes below `/runs`; see `RunRoutes` for the arguments."""
    routes = RunRoutes(host, operations, logs, answer_s=answer_s, body_bytes_max=body_bytes_max)
    router = APIRouter(prefix="/runs", tags=["runs"], dependencies=[Depends(check_query)])
    router.get("")(routes.list_runs)
    router.post("/{app}", openapi_extra=_body(StartIn))(routes.start)
    router.post("/{app}/move", openapi_extra=_body(MoveAllIn))(routes.move_all)
    # The id of a run may contain slashes.
    one = "/{app}/{run:path}"
    router.post(f"{one}/cancel")(routes.cancel)
    router.post(f"{one}/retry")(routes.retry)
    router.post(f"{one}/fork", openapi_extra=_body(ForkIn))(routes.fork)
    router.post(f"{one}/move", openapi_extra=_body(MoveIn))(routes.move)
    router.post(f"{one}/signal", openapi_extra=_body(SignalIn))(routes.signal)
    router.post(f"{one}/query", openapi_extra=_body(QueryIn))(routes.query)
    router.get(f"{one}/events", response_class=StreamingResponse)(routes.events)
    router.get(f"{one}/result")(routes.result)
    router.get(one)(routes.show)
    return router


def _place_in(page: str | None) -> RunPlace | None:
    if page is None:
        return None
    try:
        return place_of(page)
    except ValueError:
        problem = "is the text `next` of an earlier answer"
        raise InvalidArgumentsError(
            f"Nothing was done: the query's field 'page' {problem}.",
            [{"field": "page", "problem": problem}],
        ) from None


def _body(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
