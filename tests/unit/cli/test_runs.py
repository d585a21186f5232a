"""The commands `indilog runs` without a platform: what they ask, and what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from indilog.cli.commands import app

Answer = Callable[[httpx.Request], Any]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["runs", *arguments])


class Gateway:
    """Answers requests by their paths."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        found = self.answers[request.url.raw_path.decode().partition("?")[0]]
        answer = found.pop(0) if len(found) > 1 else found[0]
        return httpx.Response(200, text=json.dumps(answer))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made, real = Gateway(), httpx.Client

    def client(**given: object) -> httpx.Client:
        return real(base_url=str(given["base_url"]), transport=httpx.MockTransport(made))

    monkeypatch.setattr(httpx, "Client", client)
    return made


def listed(*runs: dict[str, Any], following: str | None = None, **missing: str) -> dict[str, Any]:
    return {"runs": runs, "next": following, "not_answered": missing}


def info(id: str, app: str = "travel", **more: object) -> dict[str, Any]:  # noqa: A002
    return {
        "id": id, "app": app, "workflow": "order", "state": "running", "began": 1.7e9, "steps": 3,
        "problem": None, "waits": None, "value": None, "log": "l", "seqnum": 1, **more,
    }  # fmt: skip


def details(**more: object) -> dict[str, Any]:
    return {
        "run": info("a"), "owner": "e1", "epoch": 2, "arguments": {"n": 1}, "steps": [],
        "steps_before": 0, "waits": [], "advice": None, "cancel_asked": False, "changed": 1.7e9,
        "result": None, "parent": None, "forked": None, **more,
    }  # fmt: skip


def test_the_list_reads_pages_until_it_has_enough(gateway: Gateway) -> None:
    pages = [listed(info("a"), following="p1"), listed(following="p2"), listed(info("b"))]
    gateway.answers["/runs"] = pages
    done = run("list", "--limit", "5", "--workflow", "order", "--newer", "2h", "--json")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a", "b"]
    first, second, third = (dict(request.url.params) for request in gateway.asked)
    assert first == {"workflow": "order", "newer_s": "7200.0", "limit": "5"}
    assert (second["page"], second["limit"]) == ("p1", "4")
    assert (third["page"], third["limit"]) == ("p2", "4")


def test_a_list_that_goes_on_says_how_to_continue(gateway: Gateway) -> None:
    gateway.answers["/runs"] = [listed(info("a"), following="p1")]
    done = run("list", "--limit", "1", "--page", "p0")
    assert done.stderr == "There are more runs: --page p1\n"
    assert gateway.asked[0].url.params["page"] == "p0"
    assert "2023-11-14 22:13:20" in done.stdout


def test_a_list_says_for_what_a_run_waits_and_counts_no_steps_of_it(gateway: Gateway) -> None:
    gateway.answers["/runs"] = [listed(info("a", steps=None, waits="signal 'paid'"))]
    row = run("list").stdout.splitlines()[-1]
    assert row.endswith("waits for signal 'paid'")
    assert "None" not in row


def test_an_empty_list_is_said_unless_apps_are_missing(gateway: Gateway) -> None:
    gateway.answers["/runs"] = [listed()]
    assert run("list").stdout == "There are no such runs.\n"
    gateway.answers["/runs"] = [listed(slow="App slow did not answer within 3 s.")]
    done = run("list")
    assert (done.stdout, done.stderr) == ("", "warning: App slow did not answer within 3 s.\n")


def test_the_app_of_a_run_is_found_by_its_id(gateway: Gateway) -> None:
    gateway.answers["/runs"] = [listed(info("a/1.x", app="other"))]
    gateway.answers["/runs/other/a%2F1%2Ex/signal"] = [None]
    assert run("signal", "a/1.x", "paid", "7", "--key", "k").stdout == "Sent to run a/1.x.\n"
    assert gateway.asked[0].url.params["id"] == "a/1.x"
    assert json.loads(gateway.asked[1].content) == {"name": "paid", "value": 7, "key": "k"}


@pytest.mark.parametrize(
    ("answer", "sentence", "code"),
    [
        (listed(), "No deployed app has a run 'a'; `indilog runs list` shows the runs.", 2),
        (
            listed(info("a", app="x"), info("a", app="y")),
            "The apps x, y have a run 'a'; name one with --app.",
            2,
        ),
        (
            listed(slow="App slow did not answer within 3 s."),
            (
                "App slow did not answer within 3 s. So it is unknown which app has run 'a'; name "
                "it with --app."
            ),
            1,
        ),
    ],
)
def test_a_run_that_is_not_found_in_one_app_is_one_sentence(
    gateway: Gateway, answer: dict[str, Any], sentence: str, code: int
) -> None:
    gateway.answers["/runs"] = [answer]
    done = run("cancel", "a")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"{sentence}\n")


def test_a_run_shows_what_it_waits_for_and_what_to_do(gateway: Gateway) -> None:
    wait = {"what": "sleep (operation 4)", "since": 1.7e9, "until": 1.7e9 + 60, "attempts": 2,
            "error": "OSError: no route", "next_attempt": 1.7e9 + 30}  # fmt: skip
    step = {"number": "3", "name": "pay", "kind": "step", "decided": 1.7e9, "attempts": 4,
            "duration_s": 61.25, "result": "x" * 500, "error": None}  # fmt: skip
    found = details(waits=[wait], steps=[step], steps_before=2, advice="Deploy it again.")
    gateway.answers["/runs/travel/a"] = [found]
    done = run("show", "a", "--app", "travel", "--steps", "1")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == "Run a of travel: running."
    assert "owner        e1, epoch 2" in lines
    assert "what to do   Deploy it again." in lines
    assert "Decided steps (2 earlier ones)" in lines
    for part in ("sleep (operation 4)", "2023-11-14 22:14:20", "2023-11-14 22:13:50",
                 "OSError: no route",
                 "1 minute 1.25 seconds", "(500 characters)"):  # fmt: skip
        assert part in done.stdout
    assert gateway.asked[0].url.params["steps"] == "1"


def test_a_run_shows_the_signals_that_no_operation_has_consumed(gateway: Gateway) -> None:
    unconsumed = [{"name": "payed", "count": 2}, {"name": "\x1b[2J", "count": 1}]
    found = details(unconsumed=unconsumed, unconsumed_others=1234)
    gateway.answers["/runs/travel/a"] = [found]
    lines = [line.rstrip() for line in run("show", "a", "--app", "travel").stdout.splitlines()]
    at = lines.index("Signals that no operation has consumed (and 1,234 of other names)")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["signal", "count"],
        ["payed", "2"],
    ]
    assert "\x1b" not in lines[at + 3]


def test_a_round_names_the_rounds_before_and_after_it(gateway: Gateway) -> None:
    gateway.answers["/runs/travel/a"] = [details(round=7, predecessor=6, successor=8)]
    done = run("show", "a", "--app", "travel", "--round", "7")
    assert "round        7, after round 6, before round 8" in done.stdout.splitlines()
    assert gateway.asked[0].url.params["round"] == "7"


def test_runs_are_selected_by_the_deployment_whose_code_they_have(gateway: Gateway) -> None:
    gateway.answers["/runs"] = [listed(info("a"))]
    assert run("list", "--version", "3").exit_code == 0
    assert gateway.asked[0].url.params["version"] == "3"


@pytest.mark.parametrize(
    ("version", "moved", "line"),
    [
        (3, None, "version      3"),
        (4, 1.7e9, "version      4, moved to it at 2023-11-14 22:13:20"),
        (None, None, None),
    ],
)
def test_a_run_shows_which_code_it_has(
    gateway: Gateway, version: int | None, moved: float | None, line: str | None
) -> None:
    gateway.answers["/runs/travel/a"] = [details(run=info("a", version=version), moved=moved)]
    lines = run("show", "a", "--app", "travel").stdout.splitlines()
    assert [found for found in lines if found.startswith("version")] == ([line] if line else [])


def test_a_query_has_arguments(gateway: Gateway) -> None:
    gateway.answers["/runs/travel/a/query"] = [5]
    done = run("query", "a", "left", "unit=kg", "at_least:=5", "--app", "travel")
    assert done.stdout == "5\n"
    asked = json.loads(gateway.asked[0].content)
    assert asked == {"name": "left", "arguments": {"unit": "kg", "at_least": 5}}
    assert "An argument is written name=value" in run("query", "a", "left", "x").stderr


def test_a_run_cannot_send_commands_to_the_terminal(gateway: Gateway) -> None:
    evil = "\x1b[2Jx\n\x9by\u202e"
    shown = "\\x1b[2Jx\\n\\x9by\\u202e"
    gateway.answers["/runs"] = [listed(info(evil, problem=evil))]
    gateway.answers["/runs/travel/a"] = [
        details(
            run=info(evil),
            arguments=evil,
            advice=evil,
            waits=[{"what": evil, "since": None, "until": None, "attempts": 0, "error": evil}],
        )
    ]
    for arguments in (("list",), ("show", "a", "--app", "travel")):
        done = run(*arguments)
        assert shown in done.stdout
        for line in done.stdout.splitlines():
            assert line.isprintable(), line


def test_a_moved_run_is_named_with_its_deployment(gateway: Gateway) -> None:
    gateway.answers["/runs/travel/a/move"] = [{"version": 3}]
    said = run("move", "a", "--version", "3", "--app", "travel").stdout
    assert said.startswith("Run a continues with deployment 3; ")
    assert json.loads(gateway.asked[-1].content) == {"version": 3}


def test_all_runs_of_an_application_move_page_by_page(gateway: Gateway) -> None:
    """Those that are refused are named, and all pages move to one deployment."""
    refused = [{"id": "b", "workflow": "order", "reason": "Run 'b' was not moved."}]
    gateway.answers["/runs/travel/move"] = [
        {"version": 3, "moved": ["a"], "refused": refused, "next": "p1"},
        {"version": 3, "moved": ["c", "d"], "refused": [], "next": None},
        {"version": None, "moved": [], "refused": [], "next": None},
    ]
    result = run("move", "--app", "travel", "--workflow", "order")
    assert result.exit_code == 1
    assert "Run 'b' was not moved.\n3 runs continue with deployment 3; 1 keep" in result.stdout
    filters = {"workflow": "order"}
    assert [json.loads(request.content) for request in gateway.asked] == [
        {**filters, "state": "running"},
        {**filters, "version": 3, "state": "running", "page": "p1"},
        {**filters, "version": 3, "state": "parked"},
    ]


def test_a_run_and_filters_are_not_given_together(gateway: Gateway) -> None:
    assert "not both" in run("move", "a", "--state", "parked").stderr
    assert "with --app" in run("move").stderr
    assert gateway.asked == []


def test_a_forked_run_is_printed_alone(gateway: Gateway) -> None:
    gateway.answers["/runs/travel/a/fork"] = [{"id": "new"}]
    assert run("fork", "a", "pay", "--app", "travel").stdout == "new\n"
    assert json.loads(gateway.asked[0].content) == {"step": "pay"}
