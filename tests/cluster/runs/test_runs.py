"""Workflow runs of deployed applications, seen and steered by people: over HTTP, on the command
line and from a client.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

import indilog
from indilog.cli.commands import app as command
from indilog.runs import Run
from indilog.sdk.runs import RunPlace, cursor_of
from tests.cluster.function_platform import Platform, running
from tests.support.clients import command_clients_closed

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

TRAVEL = """
import bokiflow, indilog

app = indilog.App("travel")
flow = bokiflow.Flow(app)

async def pay(n: int) -> int:
    return n

async def send() -> str:
    if STAMPS:
        return "sent"
    raise ValueError("no stamps")

@flow.workflow
async def order(wf: bokiflow.Workflow, n: int) -> list[object]:
    paid = await wf.step(pay, n)
    by = await wf.signal("paid")
    return [paid, by, await wf.step(send, retries=0)]

@flow.workflow
async def works(wf: bokiflow.Workflow) -> None:
    for percent in (10, 50):
        wf.publish({"percent": percent})
    await wf.signal("go")
    wf.publish({"percent": 100})

async def mail(to: str) -> str:
    raise ConnectionError(f"no route to {to}")

async def hang() -> None:
    import asyncio
    await asyncio.sleep(3600)

@flow.workflow
async def stuck(wf: bokiflow.Workflow) -> None:
    later = bokiflow.Retry(first=3600, longest=3600)
    await wf.gather(wf.step(mail, "ann", retry=later), wf.step(hang))

@app.function
async def get_stuck(id: str) -> str:
    return (await stuck.start(id=id)).id

@app.function
async def work(id: str) -> str:
    return (await works.start(id=id)).id

@app.function
async def start(n: int, id: str) -> str:
    return (await order.start(n, id=id)).id

@app.function
async def ended(id: str) -> str:
    try:
        return str(await order.handle(id).result(55))
    except bokiflow.RunFailedError as error:
        return str(error)

STAMPS = False
"""
DOUBLE = """
@flow.workflow
async def double(wf: bokiflow.Workflow, n: int) -> int:
    return 2 * n
"""
OTHER = TRAVEL.replace('"travel"', '"other"')
SLOW = """
import asyncio, indilog

app = indilog.App("slow")

@app.function
async def nothing() -> None: ...

async def list_runs(ctx: indilog.Context, limit: int = 1, id: str = "") -> None:
    await asyncio.sleep(600)

app.add_operation("runs.list", list_runs)
"""


HOSTILE_PLACES = [
    RunPlace(1e308, "travel", "travel/flow", 10**30),
    RunPlace(-1e308, "travel", "travel/flow", -(10**30)),
    RunPlace(1e308, "zzz"),
    RunPlace(-1e308, ""),
]


@asynccontextmanager
async def with_travel(directory: Path) -> AsyncIterator[Platform]:
    async with running(directory, workers=2, apps_answer_s=100.0) as there:
        answer = await there.deploy("travel", TRAVEL)
        assert answer.status_code == 200, answer.text
        yield there


@pytest_asyncio.fixture(loop_scope="module")
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with with_travel(tmp_path) as there:
        yield there


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    """Run one platform for the tests whose runs have ids of their own, and that list none."""
    async with with_travel(tmp_path_factory.mktemp("runs")) as there:
        yield there


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    with command_clients_closed():
        yield


async def indi(platform: Platform, *arguments: str) -> Result:
    given = [*arguments, "--url", platform.url]
    return await asyncio.to_thread(CliRunner().invoke, command, given)


async def start(platform: Platform, name: str, id: str, n: int = 1) -> None:  # noqa: A002
    answer = await platform.call(f"{name}.start", n=n, id=id)
    assert answer.json() == id, answer.text


async def test_the_command_line_follows_a_run_to_its_end(platform: Platform) -> None:
    await start(platform, "travel", "order-42", 7)
    listed = await indi(platform, "runs", "list", "--json")
    [run] = map(json.loads, listed.stdout.splitlines())
    assert (run["app"], run["id"], run["state"]) == ("travel", "order-42", "running")
    table = await indi(platform, "runs", "list", "--state", "running", "--newer", "1h")
    assert table.exit_code == 0
    assert "order-42" in table.stdout
    sent = await indi(platform, "runs", "signal", "order-42", "paid", '{"by": "card"}')
    assert sent.stdout == "Sent to run order-42.\n"
    assert "no stamps" in (await platform.call("travel.ended", id="order-42")).text
    shown = await indi(platform, "runs", "show", "order-42")
    assert shown.stdout.startswith("Run order-42 of travel: failed.\n")
    for part in (
        "problem      ValueError: Step 'send' failed: ValueError: no stamps",
        "`indilog runs fork order-42 STEP`",
        '{"by": "card"}',
        "Decided steps",
    ):
        assert part in shown.stdout
    again = TRAVEL.replace("STAMPS = False", "STAMPS = True")
    assert (await platform.deploy("travel", again)).status_code == 200
    forked = await indi(platform, "runs", "fork", "order-42", "send")
    new = forked.stdout.strip()
    assert (await platform.call("travel.ended", id=new)).json() == "[7, {'by': 'card'}, 'sent']"
    value = await indi(platform, "runs", "query", new, "send")
    assert value.stdout == "sent\n"
    details = json.loads((await indi(platform, "runs", "show", new, "--json")).stdout)
    assert (details["run"]["state"], details["forked"]) == ("done", "order-42, step 3")


async def test_every_worker_shows_a_step_that_hangs_and_one_that_fails(
    shared: Platform,
) -> None:
    await shared.call("travel.get_stuck", id="s")
    async with asyncio.timeout(200):
        while True:
            asked = [shared.http.get("/runs/travel/s") for _ in range(8)]
            answers = [answer.json() for answer in await asyncio.gather(*asked)]
            since = [[wait["since"] for wait in found["waits"]] for found in answers]
            if all(len(times) == 2 and all(times) for times in since):
                break
    for found in answers:
        hangs, fails = sorted(found["waits"], key=lambda wait: str(wait["what"]))
        assert hangs["what"] == "step 'hang' (operation 2)", "the same from both workers"
        assert (hangs["attempts"], hangs["error"]) == (0, None)
        assert fails["what"] == "step 'mail' (operation 1)"
        assert (fails["attempts"], fails["error"]) == (1, "ConnectionError: no route to ann")
        assert fails["next_attempt"] - fails["since"] == pytest.approx(3600, abs=30)
    shown = await indi(shared, "runs", "show", "s")
    assert "ConnectionError: no route to ann" in shown.stdout
    assert "next attempt" in shown.stdout


@pytest.mark.repeated("tests/unit/bokiflow/test_cancel_grace.py")
async def test_a_cancelled_run_ends_although_its_steps_hang(platform: Platform) -> None:
    code = TRAVEL.replace("Flow(app)", "Flow(app, cancel_grace=0.2)").replace(
        "    await asyncio.sleep(3600)",
        "    while True:\n"
        "        try:\n"
        "            await asyncio.sleep(3600)\n"
        "        except asyncio.CancelledError:\n"
        "            pass",
    )
    assert (await platform.deploy("travel", code)).status_code == 200
    await platform.call("travel.get_stuck", id="s")
    async with asyncio.timeout(200):
        waits: list[dict[str, Any]] = []
        while [bool(wait["since"]) for wait in waits] != [True, True]:  # both bodies run, or have
            waits = (await platform.http.get("/runs/travel/s")).json()["waits"]
        assert (await indi(platform, "runs", "cancel", "s")).exit_code == 0
        shown = ""
        while not shown.startswith("Run s of travel: cancelled."):
            shown = (await indi(platform, "runs", "show", "s")).stdout
    assert "at step 'hang'. Its body ignored the cancellation and was abandoned." in shown
    assert "at step 'mail'." in shown


@pytest.mark.repeated("tests/unit/cli/test_runs.py")
async def test_mistakes_on_the_command_line_are_one_sentence(shared: Platform) -> None:
    for arguments, sentence in (
        (("show", "x"), "No deployed app has a run 'x'; `indilog runs list` shows the runs."),
        (("show", "x", "--app", "travel"), "App travel has no run 'x', or it was trimmed after"),
        (("cancel", "x", "--app", "nix"), "No app 'nix' is deployed; `indilog apps` lists"),
        (("signal", "x", "paid", "card"), "The value is not JSON: "),
        (("list", "--older", "soon"), "--older is an age (90s, 10m, 2d), not 'soon'."),
        (("list", "--state", "asleep"), "travel.runs.list was not run: field 'state' does not fit"),
        (("list", "--page", "x"), "Nothing was done: the query's field 'page' is the text `next`"),
        (("show", ""), "Give the id of a run; `indilog runs list` shows them."),
    ):
        done = await indi(shared, "runs", *arguments)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr.startswith(sentence), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.repeated("tests/unit/cli/test_runs.py")
async def test_a_run_with_one_id_in_two_apps_needs_the_app(shared: Platform) -> None:
    await shared.deploy("other", OTHER)
    await start(shared, "travel", "a/1")
    await start(shared, "other", "a/1")
    refused = await indi(shared, "runs", "cancel", "a/1")
    assert refused.stderr == ("The apps other, travel have a run 'a/1'; name one with --app.\n")
    assert refused.exit_code == 2
    done = await indi(shared, "runs", "cancel", "a/1", "--app", "other")
    assert done.exit_code == 0, done.output
    assert "Cancelled" in (await shared.call("other.ended", id="a/1")).text
    again = await indi(shared, "runs", "signal", "a/1", "paid", "--app", "other")
    assert again.stderr == "Run 'a/1' has ended; it would not receive the signal.\n"
    undeployed = await shared.http.delete("/apps/other")
    assert undeployed.status_code == 200
    gone = await indi(shared, "runs", "show", "a/1", "--app", "other")
    assert gone.stderr.startswith("App other was undeployed at ")
    assert (await indi(shared, "runs", "show", "a/1")).exit_code == 0, "only one app is left"


@pytest.mark.repeated("tests/unit/cli/test_runs.py")
async def test_an_app_that_does_not_answer_is_named_and_the_others_are_listed(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=2, apps_answer_s=8.0) as platform:
        for name, source in (("travel", TRAVEL), ("slow", SLOW)):
            assert (await platform.deploy(name, source)).status_code == 200
        await start(platform, "travel", "a")

        async def said_by(*arguments: str) -> Result:
            """Repeat a command while the app that answers is too late, as on a busy machine."""
            while "travel" in (done := await indi(platform, *arguments)).stderr:
                pass
            return done

        listed = await said_by("runs", "list")
        assert listed.exit_code == 0
        assert "travel" in listed.stdout
        assert listed.stderr == "warning: App slow did not answer within 8 s.\n"
        missing = await said_by("runs", "show", "b")
        assert missing.stderr == (
            "App slow did not answer within 8 s. So it is unknown which app has run 'b'; name it "
            "with --app.\n"
        )
        async with asyncio.timeout(100):
            while platform.host.status()["calls_running"]:  # noqa: ASYNC110 - not announced
                await asyncio.sleep(0.05)


async def test_a_client_sees_and_steers_runs(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        for number in range(3):
            await client.call("travel.start", n=number, id=f"order-{number}")
        page = await client.runs(limit=2)
        listed: list[Run] = [*page, *await client.runs(page=page.next)]
        assert [run.id for run in listed] == ["order-2", "order-1", "order-0"]
        assert listed[0].info is not None
        assert listed[0].info.workflow == "order"
        await listed[0].signal("paid", 5, key="k")
        await client.call("travel.ended", id="order-2")
        details = await client.run("travel", "order-2").show()
        assert [step.result for step in details.steps] == [2, 5, None]
        fork = await listed[0].fork("3")
        assert (await fork.show()).forked == "order-2, step 3"
        await listed[1].cancel()
        await client.call("travel.ended", id="order-1")
        assert [run.id for run in await client.runs("travel", state="cancelled")] == ["order-1"]
        with pytest.raises(indilog.NotFoundError, match="App travel has no run 'x'"):
            await client.run("travel", "x").show()
        with pytest.raises(indilog.WrongStateError, match="has ended"):
            await listed[0].signal("paid")
        with pytest.raises(indilog.UnknownFunctionError, match="No app 'nix' is deployed"):
            await client.runs("nix")
        with pytest.raises(indilog.InvalidArgumentsError, match="'state' does not fit"):
            await client.runs("travel", state="asleep")


async def test_operations_are_not_functions(shared: Platform) -> None:
    http = shared.http
    answer = await http.post("/functions/travel/runs.list", json={})
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        "travel.runs.list is an operation for people, which cannot be called as a function.",
    )
    assert (await http.post("/functions/travel/runs.list?async=1", json={})).status_code == 404
    keyed = {"idempotency-key": "k"}
    assert (await http.post("/functions/travel/runs.list", headers=keyed)).status_code == 404
    answer = await http.post("/operations/travel/runs.list", headers=keyed)
    assert answer.status_code == 400
    assert "takes neither a query nor an Idempotency-Key" in answer.json()["detail"]
    assert (await http.post("/operations/travel/start", json={})).status_code == 404
    answer = await http.post("/operations/travel/runs.lst", json={})
    assert "App travel has no operation 'runs.lst'; did you mean 'runs.list'?" in answer.text
    [app] = (await http.get("/apps")).json()["apps"]
    assert "runs.list" in [operation["name"] for operation in app["operations"]]
    assert "runs.list" not in [function["name"] for function in app["functions"]]
    async with indilog.connect(shared.url) as client:
        for call in (client.call, client.send):
            with pytest.raises(
                indilog.UnknownFunctionError, match="cannot be called as a function"
            ):
                await call("travel.runs.list")


HOSTILE = [
    ("GET", "/runs/travel/%00", 404),
    ("GET", "/runs/travel/%1F", 422),
    ("GET", "/runs/travel/" + "x" * 5000, 422),
    ("GET", "/runs/travel/%FF", 422),
    ("GET", "/runs/..%2Ftravel/x", 404),
    *(("GET", f"/runs?page={cursor_of(place)}", 200) for place in HOSTILE_PLACES),
    ("GET", "/runs?older_s=1e300&newer_s=1e300", 200),
    ("PUT", "/runs/travel/x", 405),
    ("POST", "/runs/travel/x/erase", 405),
    ("POST", "/operations/travel/", 404),
    ("POST", "/operations/travel/../x", 404),
]


async def test_hostile_requests_are_refused_in_a_sentence(shared: Platform) -> None:
    await start(shared, "travel", "a")
    for method, path, status in HOSTILE:
        answer = await shared.http.request(method, path)
        assert answer.status_code == status, (path, answer.text)
        if status >= 400:
            detail: str = answer.json()["detail"]
            assert detail.endswith("."), path
            assert "\n" not in detail, path
            assert len(detail) < 500, path


async def test_the_example_of_the_interface_runs_unchanged(
    platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "API.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "client.runs(" in block]
    await start(platform, "travel", "order-41")
    await platform.http.post("/runs/travel/order-41/signal", json={"name": "paid"})
    await platform.call("travel.ended", id="order-41")
    await start(platform, "travel", "order-42")
    assert block.count("result(wait=60)") == 1, "it waits for a run that does not end"
    block = block.replace("result(wait=60)", "result(wait=0.1)")
    code = compile(block, "API.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, {"indilog": indilog, "url": platform.url})
    assert "travel order-41 ValueError: Step 'send' failed: ValueError: no stamps It has ended" in (
        capsys.readouterr().out
    )
    await platform.call("travel.ended", id="order-42")
    found = (await platform.http.get("/runs/travel/order-42")).json()
    assert [step["result"] for step in found["steps"]] == [1, {"by": "card"}, None]


async def test_a_watched_run_is_followed_to_its_end(shared: Platform) -> None:
    await shared.call("travel.work", id="w")
    seen: list[dict[str, Any]] = []
    async with (
        asyncio.timeout(200),
        shared.http.stream("GET", "/runs/travel/w/events") as stream,
    ):
        async for line in stream.aiter_lines():
            seen += _events([line])
            if len(seen) == 3:
                break  # as a lost connection
        while shared.host.status()["calls_running"]:  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.05)  # a waiting stream occupies no slot
    last = str(seen[-1]["seqnum"])
    signalled = asyncio.ensure_future(indi(shared, "runs", "signal", "w", "go"))
    rest = await shared.http.get("/runs/travel/w/events", headers={"last-event-id": last})
    assert (await signalled).exit_code == 0
    seen += _events(rest.text.splitlines())
    assert [event["data"] for event in seen] == [
        {"state": "running", "problem": None},
        {"percent": 10},
        {"percent": 50},
        {"percent": 100},
        {"state": "done", "problem": None},
    ]
    printed = await indi(shared, "runs", "events", "w", "--after", last)
    assert printed.exit_code == 0, printed.output
    assert list(map(json.loads, printed.stdout.splitlines())) == seen[3:]
    async with indilog.connect(shared.url) as client:
        events = client.run("travel", "w").events(after=int(last))
        assert [event.seqnum async for event in events] == [event["seqnum"] for event in seen[3:]]
    unknown = await indi(shared, "runs", "events", "x", "--app", "travel")
    assert unknown.stderr.startswith("App travel has no run 'x'")


def _events(lines: list[str]) -> list[dict[str, Any]]:
    """Return the events in lines of a stream."""
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    return list(map(json.loads, data))


@pytest.mark.repeated("tests/unit/bokiflow/runs/test_replay_check_command.py")
async def test_a_deployment_says_which_runs_its_code_does_not_continue(
    platform: Platform, tmp_path: Path
) -> None:
    for number in range(4):
        await start(platform, "travel", f"order-{number}")
    file = tmp_path / "travel.py"
    file.write_text(TRAVEL)
    same = await indi(platform, "deploy", str(file))
    assert "do not continue" not in same.stdout
    file.write_text(TRAVEL.replace('await wf.signal("paid")', "await wf.sleep(10_000)"))
    later = await indi(platform, "deploy", str(file))
    assert "do not continue" not in later.stdout, "the steps so far are the same"
    changed_text = TRAVEL.replace("await wf.step(pay, n)", "await wf.step(send)")
    file.write_text(changed_text)
    pinned = await indi(platform, "deploy", str(file))
    assert "do not continue" not in pinned.stdout, "they continue with their own code"
    order = "\nasync def order("
    file.write_text(
        changed_text.replace(f"@flow.workflow{order}", f"@flow.workflow(pinned=False){order}")
    )
    changed = await indi(platform, "deploy", str(file))
    assert changed.exit_code == 0
    [said] = [line for line in changed.stdout.splitlines() if "do not continue" in line]
    assert said == (
        "4 runs of travel do not continue with this code, so they are parked: 'order-3', "
        "'order-2', 'order-1', .... `indilog runs show ID` says why."
    )
    shown = await indi(platform, "runs", "show", "order-0")
    async with asyncio.timeout(200):
        while "parked" not in shown.stdout:
            shown = await indi(platform, "runs", "show", "order-0")
    assert "step 1 was decided as 'step pay'" in shown.stdout
    assert "what to do   Deploy code that does the decided steps first" in shown.stdout
    listed = await indi(platform, "runs", "list", "--state", "parked", "--json")
    assert "order-0" in listed.stdout


async def test_runs_are_started_and_awaited_on_the_command_line_and_over_http(
    shared: Platform,
) -> None:
    started = await indi(shared, "runs", "start", "travel.order", "n:=7", "--id", "a/b")
    assert (started.exit_code, started.output) == (0, "a/b\n")
    late = await indi(shared, "runs", "result", "a/b", "--wait", "0.1")
    assert (late.exit_code, late.output) == (1, "Run a/b is running.\n")
    answer = await shared.http.get("/runs/travel/a/b/result")
    assert answer.json() == {"state": "running", "result": None, "problem": None}
    waiting = asyncio.create_task(shared.http.get("/runs/travel/a/b/result?wait=60"))
    await shared.http.post("/runs/travel/a/b/signal", json={"name": "paid"})
    problem = "ValueError: Step 'send' failed: ValueError: no stamps"
    assert (await waiting).json() == {"state": "failed", "result": None, "problem": problem}
    failed = await indi(shared, "runs", "result", "a/b")
    assert (failed.exit_code, failed.output) == (1, f"Run a/b is failed: {problem}\n")

    body = {"workflow": "double", "arguments": {"n": 21}, "id": "d"}
    await shared.deploy("travel", TRAVEL + DOUBLE)
    for _ in range(2):
        answer = await shared.http.post("/runs/travel", json=body)
        assert (answer.status_code, answer.json()) == (200, {"id": "d"})
    done = await indi(shared, "runs", "start", "travel.double", "n:=4", "--wait", "1m")
    assert (done.exit_code, done.output) == (0, "8\n")
    async with indilog.connect(shared.url) as client:
        run = await client.start_run("travel", "double", {"n": 21}, id="d")
        assert (await run.result(wait=60)).result == 42


async def test_a_start_that_does_not_fit_is_explained_and_starts_nothing(
    platform: Platform,
) -> None:
    for body, status, sentence in (
        ({"workflow": "odrer"}, 404, "no workflow 'odrer'; there are: order, stuck, works."),
        ({"workflow": "order"}, 422, "n"),
        ({"workflow": "order", "arguments": {"n": "x"}}, 422, "n"),
        ({"workflow": "order", "arguments": [1]}, 422, "arguments"),
        ({"workflow": "order", "more": 1}, 422, "more"),
        ({}, 422, "workflow"),
        ([], 422, "the body is a JSON object"),
    ):
        answer = await platform.http.post("/runs/travel", json=body)
        assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer
    called = await indi(platform, "invoke", "travel.double")
    assert "If it is a workflow, `indilog runs start travel.double` starts it." in called.output
    for given, sentence in (
        ("order", "A workflow is named APP.WORKFLOW, not 'order'."),
        ("nothing.order", "No app 'nothing' is deployed"),
    ):
        started = await indi(platform, "runs", "start", given)
        assert (started.exit_code, sentence in started.output) == (2, True), started.output
    assert (await platform.http.get("/runs")).json()["runs"] == []
