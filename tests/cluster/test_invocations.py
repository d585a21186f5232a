"""Durable invocations on real platforms: kill -9 of workers and of everything; idempotency keys."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import indilog
from bench.support.servers import free_ports
from indilog.base.errors import FunctionFailedError, InvocationCancelledError, NotReadyError
from indilog.base.log import Log
from tests.cluster import platform_process
from tests.cluster.function_platform import Platform, running, running_two, until
from tests.cluster.platform_process import PlatformProcess, platform
from tests.support.clients import http_client
from tests.support.moved_time import moved_time
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

APP = """
import asyncio, os
import indilog
from indilog.base.errors import ConflictError

app = indilog.App("demo")

@app.function
async def work(ctx: indilog.Context, n: int) -> int:
    log = ctx.log("runs")
    runs = await log.append(b"%d" % os.getpid(), tags=[f"n:{n}"])
    await asyncio.sleep(0.01)
    return runs

@app.function
async def until_released(ctx: indilog.Context, n: int) -> int:
    log = ctx.log("runs")
    seqnum = await log.append(b"%d" % os.getpid(), tags=[f"n:{n}"])
    await log.read_next(f"go:{n}", wait=120)
    return seqnum

@app.function
async def child(ctx: indilog.Context) -> int:
    return await ctx.call("demo.work", idempotency_key="only one", n=0)

@app.function
async def later(ctx: indilog.Context, s: float) -> str:
    return await ctx.send(work, delay=s, n=9)

@app.function
async def first_waits(ctx: indilog.Context, n: int) -> int:
    log = ctx.log("runs")
    seqnum = await log.append(b"%d" % os.getpid(), tags=[f"n:{n}"])
    if len(await log.read_range(f"n:{n}", fresh=True)) == 1:
        await log.read_next("go", wait=120)
    return seqnum

@app.function
async def large(ctx: indilog.Context, n: int) -> str:
    await ctx.log("runs").append(b"%d" % os.getpid(), tags=[f"n:{n}"])
    return "x" * (2 * 1024 * 1024)

@app.function
async def conflicts(ctx: indilog.Context, n: int) -> None:
    await ctx.log("runs").append(b"%d" % os.getpid(), tags=[f"n:{n}"])
    raise ConflictError("Another one was first; run this one again.")

@app.function
async def dies() -> None:
    os._exit(1)
"""
FAST: dict[str, Any] = {
    "invocation_lease_s": 1.0,
    "invocation_retry_s_min": 0.05,
    "invocation_retry_s_max": 0.1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    """Run one platform for several tests, each with an `n` of its own."""
    async with running(tmp_path_factory.mktemp("invocations"), workers=2, **FAST) as up:
        assert (await up.deploy("demo", APP)).status_code == 200
        yield up


async def runs_of(log: Log, n: int) -> list[int]:
    return [int(record.data) for record in await log.read_range(f"n:{n}", fresh=True)]


async def outcome(http: httpx.AsyncClient, invocation: str) -> dict[str, Any]:
    """Wait for the outcome of an invocation, also while the platform is down."""
    async with asyncio.timeout(300):
        while True:
            answer = await http.get(f"/invocations/{invocation}?wait=60")
            reported: dict[str, Any] = answer.json()
            assert answer.status_code == 200, reported
            if reported["state"] in ("done", "failed"):
                return reported


async def test_an_invocation_whose_worker_is_killed_runs_again(there: Platform) -> None:
    async with indilog.connect(there.url) as client:
        log = client.log("runs")
        id_ = await client.send("demo.until_released", n=7)
        first = await log.read_next("n:7", wait=100)
        assert first is not None
        os.kill(int(first.data), signal.SIGKILL)
        second = await log.read_next("n:7", first.seqnum + 1, wait=100)
        assert second is not None
        await log.append(b"", tags=["go:7"])
        reported = await outcome(there.http, id_)
        assert (reported["state"], reported["result"]) == ("done", second.seqnum)


async def test_an_invocation_that_crashes_every_worker_fails_permanently(there: Platform) -> None:
    async with indilog.connect(there.url) as client:
        id_ = await client.send("demo.dies")
        reported = await outcome(there.http, id_)
    assert reported["problem"]["title"] == "WorkerCrashedError"
    assert "demo.dies was begun 5 times" in reported["problem"]["detail"]


async def test_the_error_of_a_too_large_result_does_not_say_that_nothing_was_done(
    there: Platform,
) -> None:
    path = "/functions/demo/large"
    keyed = await there.http.post(path, json={"n": 5}, headers={"Idempotency-Key": "k"})
    invoked = await there.http.post(f"{path}?async=1", json={"n": 5})
    reported = await outcome(there.http, invoked.json()["invocation"])
    for problem in (keyed.json(), reported["problem"]):
        assert (problem["status"], problem["kind"]) == (500, "TooLargeError")
        assert "demo.large ran, and its effects remain, but its result" in problem["detail"]
        assert "the limit is 1,048,576" in problem["detail"]
        assert "nothing was done" not in problem["detail"]
    async with indilog.connect(there.url) as client:
        assert len(await runs_of(client.log("runs"), 5)) == 2


async def test_a_key_keeps_a_conflict_and_the_error_asks_for_another_key(there: Platform) -> None:
    """A function may have had effects, so the platform does not run it again under the key."""
    path = "/functions/demo/conflicts"
    for _ in range(2):
        answer = await there.http.post(path, json={"n": 6}, headers={"Idempotency-Key": "k"})
        reported = answer.json()
        assert (answer.status_code, reported["kind"], reported["retryable"]) == (
            503,
            "ConflictError",
            False,
        )
        assert reported["detail"].endswith("to run it again, use another key.")
    without = (await there.http.post(path, json={"n": 6})).json()
    assert without["detail"].endswith("run this one again.")
    async with indilog.connect(there.url) as client:
        assert len(await runs_of(client.log("runs"), 6)) == 2
        with pytest.raises(FunctionFailedError, match="use another key"):
            await client.call("demo.conflicts", idempotency_key="k", n=6)


async def test_a_cancelled_timer_never_runs_also_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, invocations_open_max=4) as there:
        await there.deploy("demo", APP)
        timers = [
            (await there.http.post(f"/functions/demo/work?async=1&delay={s}", json={"n": n})).json()
            for n, s in ((1, 3_600), (2, 3_600))
        ]
        full = await there.http.post("/functions/demo/work?async=1&delay=60", json={"n": 3})
        assert full.status_code == 503
        assert "2 recorded invocations of app demo wait or run" in full.json()["detail"]
        ids = [timer["invocation"] for timer in timers]
        reported = (await there.http.delete(f"/invocations/{ids[0]}")).json()
        assert (reported["state"], reported["problem"]["title"]) == (
            "failed",
            "InvocationCancelledError",
        )
        again = await there.http.delete(f"/invocations/{ids[0]}")
        assert (again.status_code, again.json()["detail"]) == (
            409, f"Invocation {ids[0]} has already ended: failed.",
        )  # fmt: skip
        assert (await there.http.delete("/invocations/nope")).status_code == 404
        assert (await there.http.delete("/apps/demo")).json()["invocations_open"] == 1
    async with running(tmp_path, workers=1) as there:
        assert (await there.http.get(f"/invocations/{ids[0]}")).json()["state"] == "failed"
        assert (await there.http.get(f"/invocations/{ids[1]}")).json()["state"] == "scheduled"
        too_late = await there.http.post("/functions/demo/work?async=1&delay=1e8", json={"n": 1})
        assert (too_late.status_code, too_late.json()["errors"][0]["field"]) == (422, "delay")


async def test_a_client_asks_for_invocations_and_cancels_them(there: Platform) -> None:
    async with indilog.connect(there.url) as client, asyncio.timeout(200):
        done = await client.invocation(await client.send("demo.work", n=8), wait=50)
        assert done is not None
        assert (done.function, done.state) == ("demo.work", "done")
        recorded = await client.log("runs").read_next("n:8")
        assert recorded is not None
        assert done.result() == recorded.seqnum
        timer = await client.send("demo.work", delay=3_600, n=8)
        waits = await client.invocation(timer)
        assert waits is not None
        assert waits.state == "scheduled"
        with pytest.raises(NotReadyError, match="has not ended: scheduled"):
            waits.result()
        asking = asyncio.ensure_future(client.invocation(timer, wait=50))
        cancelled = await client.cancel(timer)
        assert cancelled is not None
        assert await asking == cancelled
        with pytest.raises(InvocationCancelledError):
            cancelled.result()
        assert await client.cancel(timer) == cancelled, (
            "a cancellation of an ended invocation changes nothing"
        )
        assert await client.cancel("nope") is None
        assert await client.invocation("nope") is None


async def test_a_cancelled_invocation_that_runs_is_asked_to_stop(there: Platform) -> None:
    started = await there.http.post("/functions/demo/until_released?async=1", json={"n": 10})
    invocation = started.json()["invocation"]
    async with asyncio.timeout(200):
        await there.http.get("/logs/runs/records?tag=n:10&wait=50")
        reported = (await there.http.delete(f"/invocations/{invocation}")).json()
        assert reported["problem"]["title"] == "InvocationCancelledError"
        assert "it was asked to stop" in reported["problem"]["detail"]
        await until(lambda: not there.host.status()["calls_running"])


async def test_the_same_key_over_http_is_one_run_and_one_result(there: Platform) -> None:
    async def call(n: int, key: str = "k") -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return await there.http.post("/functions/demo/work", json={"n": n}, headers=headers)

    answers = await asyncio.gather(*(call(1) for _ in range(10)))
    assert {a.status_code for a in answers} == {200}
    assert len({a.text for a in answers}) == 1
    assert len({a.headers["indilog-invocation"] for a in answers}) == 1
    asynchronous = await there.http.post(
        "/functions/demo/work?async=1", json={"n": 1}, headers={"Idempotency-Key": "k"}
    )
    assert asynchronous.json()["invocation"] == answers[0].headers["indilog-invocation"]
    refused = await call(2)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "Idempotency-Key"
    assert refused.json()["detail"] == (
        "demo.work was not run: its idempotency key was used with other arguments; use another key."
    )
    assert (await call(1, "")).status_code == 400
    async with indilog.connect(there.url) as client:
        log = client.log("runs")
        assert len(await runs_of(log, 1)) == 1
        assert await runs_of(log, 2) == []
        assert await client.call("demo.work", idempotency_key="k", n=1) == answers[0].json()
        first = await client.call("demo.child")
        assert await client.call("demo.child") == first


@pytest.mark.parametrize("killed", [repeated(1, "one"), pytest.param(2, id="all")])
async def test_calls_with_a_key_and_asynchronous_ones_are_accepted_although_workers_are_killed(
    tmp_path: Path, killed: int
) -> None:
    """The worker that validates their arguments is killed before it has answered."""
    async with running(tmp_path, workers=2, worker_stop_s=60.0, **FAST) as there:
        assert (await there.deploy("demo", APP)).status_code == 200
        asked = there.host._router._dispatcher.least_loaded
        assert asked is not None
        pids = [worker["pid"] for worker in there.host.status()["workers"]]
        pids.sort(key=lambda pid: pid != asked.pid)
        for pid in pids[:killed]:
            os.kill(pid, signal.SIGSTOP)
        calls = [
            asyncio.ensure_future(
                there.http.post(
                    f"/functions/demo/work{'?async=1' if n % 2 else ''}",
                    json={"n": n},
                    headers={"Idempotency-Key": f"key {n}"} if n % 3 else {},
                )
            )
            for n in (1, 2, 3, 4, 5)
        ]
        await until(lambda: there.host._checking == len(calls))
        for pid in pids[:killed]:
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert [a.status_code for a in answers] == [202, 200, 202, 200, 202]
        for answer in answers[::2]:
            assert (await outcome(there.http, answer.json()["invocation"]))["state"] == "done"
        async with indilog.connect(there.url) as client:
            for n in (1, 2, 3, 4, 5):
                assert len(await runs_of(client.log("runs"), n)) == 1


async def test_keys_and_outcomes_hold_on_every_node(tmp_path: Path) -> None:
    async with running_two(tmp_path) as (one, two):
        assert (await one.deploy("demo", APP)).status_code == 200
        await until(lambda: bool(two.host.apps()))
        headers = {"Idempotency-Key": "k"}
        answers = await asyncio.gather(*(
            node.http.post("/functions/demo/work", json={"n": 1}, headers=headers)
            for node in (one, two, one, two)
        ))  # fmt: skip
        assert len({a.text for a in answers}) == 1, [a.text for a in answers]
        sent = await one.http.post("/functions/demo/work?async=1", json={"n": 2})
        reported = await outcome(two.http, sent.json()["invocation"])
        assert reported["state"] == "done"
        async with indilog.connect(one.url) as client:
            assert len(await runs_of(client.log("runs"), 1)) == 1


async def test_a_timer_that_a_function_set_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = moved_time(monkeypatch)
    async with running(tmp_path, workers=1, **FAST) as first:
        assert (await first.deploy("demo", APP)).status_code == 200
        id_ = (await first.call("demo.later", s=3600.0)).json()
        assert (await first.http.get(f"/invocations/{id_}")).json()["state"] == "scheduled"
    async with running(tmp_path, workers=1, **FAST) as second:
        assert (await second.http.get(f"/invocations/{id_}")).json()["state"] == "scheduled"
        moved.passed_s = 3700.0
        await second.http.post("/functions/demo/work?async=1", json={"n": 1})  # it checks its time
        assert (await outcome(second.http, id_))["state"] == "done"
        async with indilog.connect(second.url) as client:
            assert len(await runs_of(client.log("runs"), 9)) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options", [pytest.param((), id="embedded"), repeated(("--processes",), "processes")]
)
async def test_a_platform_killed_during_invocations_runs_each_to_one_outcome(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Kill -9 of all processes at once: each accepted invocation ends, with one lasting outcome."""
    accepted: dict[str, int] = {}
    rng = random.Random(7)
    for start in range(2):
        with platform(tmp_path, *options) as up:
            async with http_client(up.url, timeout=150) as http:
                if start == 0:
                    await _deploy(http)
                await _send(http, up, accepted, start, rng)
    with platform(tmp_path, *options) as up:
        async with (
            http_client(up.url, timeout=150) as http,
            indilog.connect(up.url) as client,
        ):
            reported = await asyncio.gather(*(outcome(http, id_) for id_ in accepted))
            assert {t["state"] for t in reported} == {"done"}
            log = client.log("runs")
            for one in reported:
                record = await log.read(one["result"])
                assert record is not None
                assert record.tags == (f"n:{accepted[one['invocation']]}",), "its own run's result"
            again = [await outcome(http, id_) for id_ in accepted]
            assert again == list(reported), "an outcome does not change"


async def _deploy(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "text/x-python"}
    assert (await http.put("/apps/demo", content=APP, headers=headers)).status_code == 200


async def _send(
    http: httpx.AsyncClient,
    up: PlatformProcess,
    accepted: dict[str, int],
    start: int,
    rng: random.Random,
) -> None:
    """Send invocations, at once and for later, then kill everything."""
    for n in range(start * 100, start * 100 + 20):
        path = "/functions/demo/work?async=1"
        if n % 2:
            path += f"&delay={rng.random():.3f}"
        headers = {"Idempotency-Key": f"key {n}"} if n % 3 == 0 else {}
        answer = await http.post(path, json={"n": n}, headers=headers)
        assert answer.status_code == 202, answer.text
        accepted[answer.json()["invocation"]] = n
    up.kill_everything()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "stop", [repeated(signal.SIGSTOP, "paused"), pytest.param(signal.SIGKILL, id="killed")]
)
async def test_another_compute_node_takes_over_the_runs_of_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: signal.Signals
) -> None:
    """A paused node finds its run taken over when it resumes, and its outcome is ignored."""
    monkeypatch.setenv("INDILOG_CLUSTER_ENGINES", "2")
    # A live node that a busy machine lets wait for a lease loses its run to the other one, too.
    monkeypatch.setenv("INDILOG_NODE_INVOCATION_LEASE_S", "5")
    if stop is signal.SIGKILL:  # its restart must not be faster than the other node's takeover
        monkeypatch.setattr(platform_process, "SETTINGS", platform_process.SETTINGS | {
            "INDILOG_NODE_RESTART_S_MIN": "20", "INDILOG_NODE_RESTART_S_MAX": "20",
        })  # fmt: skip
    port = free_ports(2)
    with platform(tmp_path, "--processes", "--port", str(port)) as up:
        other = f"http://127.0.0.1:{port + 1}"
        async with (
            http_client(up.url, timeout=150) as http,
            http_client(other, timeout=150) as there,
            indilog.connect(other) as client,
        ):
            await _deploy(http)
            sent = await http.post("/functions/demo/first_waits?async=1", json={"n": 1})
            log = client.log("runs")
            first = await log.read_next("n:1", wait=100)
            assert first is not None
            up.signal_node("engine-0", stop)
            reported = await outcome(there, sent.json()["invocation"])
            second = await log.read_next("n:1", first.seqnum + 1)
            assert second is not None
            assert (reported["state"], reported["result"]) == ("done", second.seqnum)
            if stop is signal.SIGSTOP:
                up.signal_node("engine-0", signal.SIGCONT)
                await log.append(b"", tags=["go"])
                assert await outcome(http, reported["invocation"]) == reported
                again = await http.post("/functions/demo/work?async=1", json={"n": 2})
                assert (await outcome(http, again.json()["invocation"]))["state"] == "done"
            assert len(await runs_of(log, 1)) == 2


@pytest.mark.repeated("tests/unit/compute/invocations/test_invocation_list.py")
async def test_invocations_are_listed_on_every_node(tmp_path: Path) -> None:
    async with running_two(tmp_path) as (first, second):
        answer = await first.deploy("demo", APP)
        assert answer.status_code == 200, answer.text
        sent = [
            (await first.call("demo.later", s=3600)).json(),
            (await first.call("demo.later", s=3600)).json(),
        ]
        for there in (first, second):
            page = (await there.http.get("/invocations?state=scheduled&limit=1")).json()
            rest = (await there.http.get(f"/invocations?app=demo&page={page['next']}")).json()
            listed = [one["id"] for one in (*page["invocations"], *rest["invocations"])]
            assert (listed, rest["next"]) == (sent[::-1], None)
        assert (await second.http.delete(f"/invocations/{sent[0]}")).status_code == 200
        failed = (await first.http.get("/invocations?state=failed&function=demo.work")).json()
        assert [one["id"] for one in failed["invocations"]] == [sent[0]]
