"""The routes below `/runs`, with applications that answer, refuse, or do not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from fastapi import FastAPI

from indilog.base.deployed import AppInfo, FunctionSpec
from indilog.base.errors import (
    IndilogError,
    InvalidArgumentsError,
    NotFoundError,
    UnknownFunctionError,
)
from indilog.sdk.runs import RunEvent, RunEvents, RunInfo, RunPage, RunPlace
from indilog.testing import MemoryLogs
from indilog_compute.gateway.problems import problem_of, problem_text
from indilog_compute.gateway.runs import events
from indilog_compute.gateway.runs.operations import OperationAnswer
from indilog_compute.gateway.runs.routes import runs_router

pytestmark = pytest.mark.asyncio


class Apps:
    """Applications by name: each has a function that answers its operations."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.asked: list[tuple[str, str, dict[str, Any], int]] = []
        self.cancelled: list[str] = []

    def apps(self) -> list[AppInfo]:
        spec = FunctionSpec("runs.list", "", {}, {})
        return [AppInfo(name, 1, "me", (), operations=(spec,)) for name in sorted(self.answers)] + [
            AppInfo("plain", 1, "me", ())
        ]

    def app(self, name: str) -> AppInfo:
        for info in self.apps():
            if info.name == name:
                return info
        raise UnknownFunctionError(f"No app {name!r} is deployed.")

    async def run(
        self, app: str, operation: str, arguments: bytes, *, position: int = 0
    ) -> OperationAnswer:
        given = json.loads(arguments)
        self.asked.append((app, operation, given, position))
        answer = self.answers[app](given)
        if asyncio.isfuture(answer):
            try:
                await answer
            finally:
                self.cancelled.append(app)
        if isinstance(answer, Exception):
            details = problem_of(answer)
            return OperationAnswer(details.status, {}, problem_text(details))
        headers = {"indilog-position": "9", "content-type": "application/json"}
        return OperationAnswer(200, headers, msgspec.json.encode(answer))


def page(*began: float, more: bool = False) -> RunPage:
    runs = tuple(RunInfo(id=f"r{b:g}", workflow="w", state="done", began=b) for b in began)
    return RunPage(runs, RunPlace(began[-1]) if more else None)


class Served:
    """The routes, their applications, and a client."""

    def __init__(self) -> None:
        self.apps = Apps()
        app = FastAPI()
        given: Any = self.apps
        self.logs = MemoryLogs()
        app.include_router(runs_router(given, given, self.logs, answer_s=0.2, body_bytes_max=1000))

        async def failed(_request: object, error: Exception) -> Any:  # noqa: ANN401
            from fastapi import Response

            details = problem_of(error)
            return Response(problem_text(details), status_code=details.status)

        app.add_exception_handler(IndilogError, failed)
        share = SimpleNamespace(take_up_to=lambda _: None, free=lambda: None)

        async def with_share(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
            scope["indilog.share"] = share
            await app(scope, receive, send)

        transport = httpx.ASGITransport(with_share)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def get(self, path: str) -> Any:  # noqa: ANN401
        return (await self.http.get(path)).json()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    async with made.http:
        yield made


async def test_runs_of_all_applications_are_one_list(served: Served) -> None:
    served.apps.answers |= {"a": lambda _: page(5, 3), "b": lambda _: page(6, 4)}
    answer = await served.http.get("/runs", headers={"indilog-position": "7"})
    found = answer.json()
    assert [(run["app"], run["id"]) for run in found["runs"]] == [
        ("b", "r6"), ("a", "r5"), ("b", "r4"), ("a", "r3"),
    ]  # fmt: skip
    assert (found["next"], found["not_answered"]) == (None, {})
    assert [asked[3] for asked in served.apps.asked] == [7, 7]
    assert answer.headers["indilog-position"] == "9"


async def test_the_filters_reach_the_applications(served: Served) -> None:
    served.apps.answers["a"] = lambda _: page()
    await served.http.get("/runs?workflow=w&state=parked&id_prefix=x&older_s=5&newer_s=9.5&limit=3")
    assert served.apps.asked == [
        (
            "a",
            "runs.list",
            {
                "workflow": "w",
                "state": "parked",
                "id_prefix": "x",
                "older_s": 5.0,
                "newer_s": 9.5,
                "limit": 3,
            },
            0,
        )
    ]


async def test_a_page_continues_where_the_one_before_ended(served: Served) -> None:
    served.apps.answers |= {"a": lambda _: page(5, 3), "b": lambda _: page(6, more=True)}
    found = await served.get("/runs?limit=2")
    assert [run["id"] for run in found["runs"]] == ["r6"], "b may have further ones before a's"
    await served.get(f"/runs?limit=2&page={found['next']}")
    expected = {"time": 6.0, "app": "b", "log": "", "seqnum": 0}
    assert [asked[2]["before"] for asked in served.apps.asked[2:]] == [expected] * 2


async def test_an_application_that_does_not_answer_is_named_and_cancelled(served: Served) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served.apps.answers |= {"a": lambda _: page(5), "slow": lambda _: never}
    served.apps.answers["full"] = lambda _: UnknownFunctionError("Undeployed just now.")
    found = await served.get("/runs")
    assert [run["id"] for run in found["runs"]] == ["r5"]
    assert found["not_answered"] == {
        "slow": "App slow did not answer within 0.2 s.",
        "full": "Undeployed just now.",
    }
    assert served.apps.cancelled == ["slow"]


async def test_a_wrong_question_is_refused_as_a_whole(served: Served) -> None:
    served.apps.answers |= {
        "a": lambda _: page(5),
        "b": lambda _: InvalidArgumentsError("field 'state' does not fit."),
    }
    answer = await served.http.get("/runs?state=bogus")
    assert (answer.status_code, answer.json()["detail"]) == (422, "field 'state' does not fit.")


async def test_one_application_answers_itself(served: Served) -> None:
    served.apps.answers |= {"a": lambda _: page(5), "b": lambda _: page(6)}
    assert [run["id"] for run in (await served.get("/runs?app=a"))["runs"]] == ["r5"]
    assert (await served.get("/runs?app=x"))["detail"] == "No app 'x' is deployed."
    answer = await served.http.get("/runs?app=plain")
    assert answer.status_code == 404
    assert answer.json()["detail"].startswith("The deployed version of app plain has no workflows.")
    for path in ("/runs/plain/r1", "/runs/x/r1"):
        assert (await served.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("page=xx", "'page' is the text `next` of an earlier answer"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("older_s=-1", "older_s"),
        ("newer_s=nan", "newer_s"),
        ("stat=parked", "'stat' is not known; the fields are app, workflow, state"),
    ],
)
async def test_invalid_queries_ask_no_application(served: Served, query: str, problem: str) -> None:
    served.apps.answers["a"] = lambda _: page()
    answer = await served.http.get(f"/runs?{query}")
    assert (answer.status_code, problem in answer.text) == (422, True), answer.text
    assert served.apps.asked == []


@pytest.mark.parametrize("action", ["cancel", "retry", "fork", "move", "signal", "query"])
async def test_actions_reach_the_run_of_any_id(served: Served, action: str) -> None:
    served.apps.answers["a"] = lambda _: None
    for id_, path in (("x", "x"), ("p/3@1", "p/3@1"), ("p/3", "p%2F3"), ("..", "%2E%2E")):
        answer = await served.http.post(f"/runs/a/{path}/{action}", json={"step": "1"})
        assert answer.status_code == 200, answer.text
        assert served.apps.asked.pop() == ("a", f"runs.{action}", {"step": "1", "id": id_}, 0)
    assert (await served.http.post(f"/runs/a/x/{action}")).status_code == 200, "without a body"


async def test_runs_of_a_list_are_moved_by_one_request(served: Served) -> None:
    served.apps.answers["a"] = lambda _: None
    given = {"version": 2, "workflow": "order"}
    answer = await served.http.post("/runs/a/move", json=given)
    assert answer.status_code == 200, answer.text
    assert served.apps.asked == [("a", "runs.move_all", given, 0)]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 422), (b"{", 422), (b"\xff", 422), (b'{"id": "y"}', 422), (b" " * 1001, 413)],
)
async def test_a_hostile_body_does_nothing(served: Served, body: bytes, status: int) -> None:
    served.apps.answers["a"] = lambda _: None
    answer = await served.http.post("/runs/a/x/cancel", content=body)
    assert answer.status_code == status, answer.text
    assert served.apps.asked == []


async def test_a_problem_of_the_application_is_the_answer(served: Served) -> None:
    served.apps.answers["a"] = lambda _: NotFoundError("App a has no run 'x'.")
    answer = await served.http.get("/runs/a/x?steps=5")
    assert (answer.status_code, answer.json()["detail"]) == (404, "App a has no run 'x'.")
    assert served.apps.asked == [("a", "runs.show", {"id": "x", "steps": 5}, 0)]


async def test_events_are_streamed_and_the_gateway_waits_for_the_next_record(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting client occupies no slot of the application: it is asked only after a record."""
    monkeypatch.setattr(events, "_ALIVE_S", 0.05)
    monkeypatch.setattr(events, "_PAUSE_S", 0.0)
    log = served.logs.log("travel/flow")

    def answer(given: dict[str, Any]) -> RunEvents:
        if given["after"] >= 3:
            last = RunEvent(5, 2.0, "state", {"state": "done"})
            return RunEvents(
                log="travel/flow", tag="flow:x", next=6, events=(last,), has_ended=True
            )
        first = RunEvent(3, 1.0, "published", 7)
        return RunEvents(log="travel/flow", tag="flow:x", next=4, events=(first,))

    served.apps.answers["a"] = answer
    for _ in range(4):
        await log.append(b"", tags=["other"])

    async def later() -> None:
        while not served.apps.asked:  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(served.apps.asked) == 1, "nothing was appended"
        await log.append(b"", tags=["flow:x"])

    appending = asyncio.create_task(later())
    got = await served.http.get("/runs/a/x/events?after=1")
    await appending
    assert got.headers["content-type"].startswith("text/event-stream")
    parts = got.text.split("\n\n")
    event = '{"seqnum":3,"time":1.0,"kind":"published","data":7}'
    assert parts[0] == f"id: 3\nevent: published\ndata: {event}"
    assert ": alive" in parts[1:-1]
    assert parts[-2].startswith("id: 5\nevent: state\n")
    assert [asked[2]["after"] for asked in served.apps.asked] == [1, 3]


async def test_a_reconnecting_client_continues_after_its_last_event(served: Served) -> None:
    served.apps.answers["a"] = lambda _: RunEvents(log="l", tag="t", next=9, has_ended=True)
    headers = {"last-event-id": "7"}
    assert (await served.http.get("/runs/a/p/3/events?after=1", headers=headers)).text == ""
    assert served.apps.asked[0][2] == {"id": "p/3", "after": 7}
    for query, more in (("after=-2", {}), ("after=x", {}), ("", {"last-event-id": "x"})):
        answer = await served.http.get(f"/runs/a/x/events?{query}", headers=more)
        assert answer.status_code == 422, query


async def test_events_of_an_unknown_run_are_refused_before_the_stream(served: Served) -> None:
    served.apps.answers["a"] = lambda _: NotFoundError("App a has no run 'x'.")
    answer = await served.http.get("/runs/a/x/events")
    assert (answer.status_code, answer.json()["detail"]) == (404, "App a has no run 'x'.")
    assert (await served.http.get("/runs/plain/x/events")).status_code == 404
