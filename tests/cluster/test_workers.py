"""Worker processes that run harmful code: how the platform notices it, and the outcomes of their
calls.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

import indilog
from indilog.config import NodeConfig
from indilog.link.link_messages import Failed
from indilog.link.worker_messages import Invoke, Load, Loaded
from indilog_compute.workers import pool, process
from tests.cluster.function_platform import DEMO, Platform, running, until
from tests.support.link_pair import LIMITS
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


@pytest_asyncio.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with running(tmp_path, workers=2) as there:
        assert (await there.deploy("demo", DEMO)).status_code == 200
        yield there


async def test_a_crashed_worker_is_replaced_and_only_its_calls_fail(platform: Platform) -> None:
    crashed = await platform.call("demo.crash")
    assert crashed.status_code == 500
    assert crashed.json()["title"] == "WorkerCrashedError"
    assert not crashed.json()["retryable"]
    answers = await asyncio.gather(*(platform.call("demo.count", name="a") for _ in range(20)))
    assert [a.status_code for a in answers] == [200] * 20


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            "import os\nos._exit(7)\n",
            "bad.py, line 2: importing the code ends the Python process (exit status 7).",
            marks=pytest.mark.repeated,
        ),
        pytest.param(
            "import ctypes\n\nctypes.string_at(0)\n",
            "bad.py, line 3: importing the code ends the Python process (SIGSEGV).",
            marks=pytest.mark.repeated,
        ),
        pytest.param(
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "At module level importing the code ends the Python process (SIGKILL).",
            marks=pytest.mark.repeated,
        ),
        pytest.param(
            "n = 0\n\nwhile True: n += 1\n",
            "bad.py, line 3: the code did not import within 5 s; move work out of module level.",
        ),
        pytest.param(
            "raise KeyboardInterrupt\n",
            "bad.py, line 1: KeyboardInterrupt.",
            marks=pytest.mark.repeated,
        ),
    ],
)
async def test_an_import_that_ends_its_process_disturbs_no_running_call(
    tmp_path: Path, source: str, sentence: str
) -> None:
    hangs = "while True" in source
    async with running(tmp_path, workers=1, import_timeout_s=5.0 if hangs else 200.0) as platform:
        assert (await platform.deploy("demo", DEMO)).status_code == 200
        async with indilog.connect(platform.url) as client:
            waiting = asyncio.ensure_future(platform.call("demo.wait_for_release"))
            assert await client.log("gate").read_next("here", wait=100) is not None
            refused = await platform.deploy("bad", source)
            assert (refused.status_code, refused.json()["title"]) == (422, "DeployError")
            assert refused.json()["detail"].startswith(sentence[:12])
            assert refused.json()["detail"] == sentence
            await client.log("gate").append(b"released", tags=["release"])
            assert (await waiting).json() == "released by version 1"
        assert platform.host.status()["worker_restarts"] == 0
        assert sorted(p.name for p in (tmp_path / "workers").iterdir()) == ["0-1"]


@pytest.mark.repeated("tests/cluster/test_functions.py")
async def test_an_app_that_no_longer_imports_stops_neither_start_nor_the_others(
    tmp_path: Path,
) -> None:
    """The import ends a bounded number of workers. Then workers start without the application, and
    its calls get the reason.
    """
    mark = tmp_path / "mark"
    deadly = f"import os\nif os.path.exists({str(mark)!r}): os._exit(5)\n"
    async with running(tmp_path, workers=2) as first:
        await first.deploy("demo", DEMO)
        assert (await first.deploy("deadly", deadly + DEMO)).status_code == 200
    mark.touch()
    async with running(tmp_path, workers=2) as second:
        assert (await second.call("demo.count", name="a")).json() == 1
        answer = await second.call("deadly.count", name="a")
        assert answer.status_code == 503
        assert answer.json()["detail"] == (
            "App deadly does not load: deadly.py, line 2: importing the code ends the Python "
            "process (exit status 5). The import is retried periodically; if its code is the "
            "cause, deploy it again."
        )
        mark.unlink()
        assert (await second.deploy("deadly", deadly + DEMO)).status_code == 200
        assert (await second.call("deadly.count", name="b")).json() == 1
        assert second.host.status()["worker_restarts"] <= 2


async def answers_everywhere(platform: Platform, app: str) -> bool:
    """Return whether calls that take all workers are answered."""
    calls = [platform.call(f"{app}.count", name="a") for _ in range(20)]
    return all(answer.status_code == 200 for answer in await asyncio.gather(*calls))


QUICK_RETRIES = {"import_retry_s_min": 0.05, "import_retry_s_max": 0.2}


async def until_it_answers(platform: Platform, app: str) -> list[str]:
    """Call an application until it answers; return the answers before."""
    reported: list[str] = []
    while (answer := await platform.call(f"{app}.count", name="a")).status_code != 200:
        assert answer.json()["retryable"] is True
        reported.append(answer.json()["detail"])
        await asyncio.sleep(0.05)
    return reported


@pytest.mark.repeated("tests/unit/compute/workers/test_retries.py")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("import os; os._exit(5)", id="exits"),
        repeated("raise ValueError('no', 'way')", "raises"),
    ],
)
async def test_an_app_that_did_not_import_is_loaded_when_the_cause_is_gone(
    tmp_path: Path, fault: str
) -> None:
    """Each worker loads the application without a new deployment; at most two workers end
    before.
    """
    mark = tmp_path / "mark"
    frail = f"import os\nif os.path.exists({str(mark)!r}):\n    {fault}\n" + DEMO
    async with running(tmp_path, workers=2) as first:
        assert (await first.deploy("frail", frail)).status_code == 200
    mark.touch()
    async with running(tmp_path, workers=2, **QUICK_RETRIES) as second:
        reported = (await second.call("frail.count", name="a")).json()["detail"]
        assert reported.startswith("App frail does not load: frail.py, line 3: ")
        mark.unlink()
        await until_it_answers(second, "frail")
        while not await answers_everywhere(second, "frail"):
            pass
        assert second.host.status()["problems"] == {}
        assert second.host.status()["worker_restarts"] <= 2


async def test_a_worker_killed_while_it_imports_does_not_count_against_the_app(
    tmp_path: Path,
) -> None:
    """However often a worker is killed, no caller gets an import error, and finally the app
    answers.
    """
    mark, pids = tmp_path / "mark", tmp_path / "pids"
    slow = (
        "import os, time\n"
        f"if os.path.exists({str(mark)!r}):\n"
        f"    with open({str(pids)!r}, 'a') as file: print(os.getpid(), file=file)\n"
        f"while os.path.exists({str(mark)!r}): time.sleep(0.01)\n"
    )

    def importing() -> list[int]:
        return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []

    async def kill_two() -> None:
        await until(lambda: len(importing()) == 1)
        os.kill(importing()[0], signal.SIGKILL)
        await until(lambda: len(importing()) == 2)
        os.kill(importing()[1], signal.SIGKILL)
        mark.unlink()

    async with running(tmp_path, workers=1) as first:
        assert (await first.deploy("slow", slow + DEMO)).status_code == 200
    mark.touch()
    killing = asyncio.ensure_future(kill_two())
    async with running(tmp_path, workers=1, **QUICK_RETRIES) as second:
        await killing
        reported = await until_it_answers(second, "slow")
        assert [words for words in reported if "does not load" in words] == []
        assert second.host.status()["problems"] == {}


async def test_a_child_process_of_a_crashed_function_is_ended(tmp_path: Path) -> None:
    """The child process holds the worker's link and output; the crash is detected nevertheless."""
    async with running(tmp_path, workers=1) as platform:
        await platform.deploy("demo", DEMO)
        crashed = await platform.call("demo.leaves_children")
        assert crashed.json()["title"] == "WorkerCrashedError"
        async with indilog.connect(platform.url) as client:
            [record] = await client.log("children").read_range()
        assert (await platform.call("demo.count", name="a")).json() == 1
        await until(lambda: is_dead(int(record.data)))


def is_dead(pid: int) -> bool:
    """Return whether a process that is not our child has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_calls_and_deployments_in_flight_are_answered_when_the_host_stops(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=1, worker_calls_max=1) as platform:
        await platform.deploy("demo", DEMO)
        host = platform.host
        async with indilog.connect(platform.url) as client:
            runs = host.call("demo.wait_for_release", b"{}")
            assert await client.log("gate").read_next("here", wait=100) is not None
        waits = host.call("demo.wait_for_release", b"{}")
        deploys = asyncio.ensure_future(host.deploy({"slow.py": "import time\ntime.sleep(600)"}))
        await until(lambda: any((tmp_path / "workers").glob("trial-*/crash_location")))
        await host.stop()
        reported = [await call.outcome for call in (runs, waits)]
        assert [t.kind for t in reported if isinstance(t, Failed)] == [
            "WorkerCrashedError",
            "NotReadyError",
        ]
        with pytest.raises(indilog.NotReadyError, match="stopped before the code was deployed"):
            await deploys
        with pytest.raises(indilog.NotReadyError, match="stopped before"):
            host.call("demo.count", b"{}")
        assert not (tmp_path / "workers").exists()


@pytest.mark.repeated("tests/cluster/faults/test_worker_disturbances.py")
async def test_a_killed_worker_fails_its_calls_at_once(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        waiting = asyncio.ensure_future(platform.call("demo.wait_for_release"))
        assert await client.log("gate").read_next("here", wait=100) is not None
        for worker in platform.host.status()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        assert (await waiting).json()["title"] == "WorkerCrashedError"
        again = asyncio.ensure_future(platform.call("demo.wait_for_release"))  # waits for a worker
        await client.log("gate").append(b"released", tags=["release"])
        assert (await again).json() == "released by version 1"


@pytest.mark.repeated("tests/cluster/faults/test_worker_disturbances.py")
async def test_calls_go_around_a_worker_whose_loop_is_blocked_until_it_is_replaced(
    tmp_path: Path,
) -> None:
    """Calls sent to it before the detection also succeed."""
    impatient = {"worker_silent_s": 1.0, "worker_stop_s": 1.0}
    async with running(tmp_path, workers=2, **impatient) as platform:
        await platform.deploy("demo", DEMO)
        begun = blocked = 0
        async with indilog.connect(platform.url) as client:
            while not platform.host.status()["calls_moved"]:  # else all came after the detection
                blocked += 1
                blocking = asyncio.ensure_future(platform.call("demo.blocks_loop"))
                here = await client.log("gate").read_next("here", begun, wait=100)
                assert here is not None
                begun = here.seqnum + 1
                answers = [platform.call("demo.count", name="a") for _ in range(20)]
                assert [a.status_code for a in await asyncio.gather(*answers)] == [200] * 20
                assert (await blocking).json()["title"] == "CallOutcomeUnknownError"
                while platform.host.status()["worker_restarts"] < blocked:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert (await platform.call("demo.count", name="b")).json() == 1


@pytest.mark.repeated("tests/cluster/faults/test_worker_disturbances.py")
async def test_a_worker_with_a_thread_that_does_not_end_is_replaced_after_its_other_calls(
    tmp_path: Path,
) -> None:
    # A busy machine may let the worker wait, which after `worker_stop_s` ends its other call, too.
    patient = {"worker_silent_s": 10.0, "worker_stop_s": 10.0, "call_timeout_s": 200.0}
    async with running(tmp_path, workers=1, **patient) as platform:
        await platform.deploy("demo", DEMO.replace("wait=60", "wait=200"))
        async with indilog.connect(platform.url) as client:
            other = asyncio.ensure_future(platform.call("demo.wait_for_release"))
            assert await client.log("gate").read_next("here", wait=100) is not None
            [before] = platform.host.status()["workers"]
            reported = (await platform.call("demo.blocks_thread")).json()["detail"]
            assert reported == (
                "demo.blocks_thread did not end within 5 s; it runs in a thread, which "
                "continues until it returns or calls ctx.wait, and may have had effects."
            )
            await until(
                lambda: any(w["pid"] != before["pid"] for w in platform.host.status()["workers"])
            )
            assert (await platform.call("demo.count", name="a")).json() == 1
            os.kill(before["pid"], 0)  # the worker still runs, for its other call
            await client.log("gate").append(b"released", tags=["release"])
            assert (await other).json() == "released by version 1"
            await until(lambda: not (tmp_path / "workers" / "0-1").exists())
            with pytest.raises(ProcessLookupError):
                os.kill(before["pid"], 0)


@pytest.mark.repeated("tests/unit/compute/workers/test_runner.py")
async def test_an_exit_in_a_task_of_a_function_ends_its_call_only(platform: Platform) -> None:
    answer = await platform.call("demo.gathers")
    assert (answer.status_code, answer.json()["kind"]) == (500, "SystemExit")
    assert platform.host.status()["worker_restarts"] == 0


async def test_workers_end_with_their_host(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as platform:
        pids = [worker["pid"] for worker in platform.host.status()["workers"]]
        assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (tmp_path / "workers").exists()


_HOSTILE_OUTPUT = r"""
import os
import structlog
import indilog

app = indilog.App("loud")

@app.function
async def any_bytes() -> None:
    deep = b'{"event":' * 20_000
    for line in (deep, b'{"event":"\xff"}', b'{"event":"x","self":1}', b"\xff\x00"):
        os.write(1, line + b"\n")

@app.function
async def flood() -> None:
    for _ in range(64):
        os.write(1, b"x\n" * 32_768)
    os.write(2, b"no end" * 65_536)

@app.function
async def speaks(ctx: indilog.Context) -> str:
    print("spoken")
    structlog.get_logger().info("spoken")
    return ctx.invocation_id
"""


_FORGETFUL = """
import gc

import indilog
from bokistore import Store

app = indilog.App("forgetful")


@app.function
async def append(ctx: indilog.Context) -> int:
    ctx.log("orders").append(b"lost")
    return 1


@app.function
async def call(ctx: indilog.Context) -> int:
    started = ctx.call("forgetful.append")
    return 1


@app.function
def sync(ctx: indilog.Context) -> int:
    Store(ctx.log("s")).increment("x", "n", 1)
    return 1


@app.function
async def leave(ctx: indilog.Context) -> int:
    circle = [ctx.log("orders").tail()]
    circle.append(circle)
    return 1


@app.function
async def collect(ctx: indilog.Context) -> int:
    return gc.collect()
"""


async def test_a_forgotten_await_fails_the_call_and_names_the_line(tmp_path: Path) -> None:
    """Otherwise the append is lost, and the caller sees a success. What the garbage collector finds
    in a later call is not that call's fault.
    """
    with structlog.testing.capture_logs() as logged:
        async with running(tmp_path, workers=1) as platform:
            assert (await platform.deploy("forgetful", _FORGETFUL)).is_success
            for function, where, name in (
                ("append", "forgetful.py, line 12: ", "RemoteLog.append"),
                ("call", "", "Context.call"),
                ("sync", "forgetful.py, line 24: ", "Store.increment"),
            ):
                answer = await platform.call(f"forgetful.{function}")
                assert answer.status_code == 500
                assert answer.json()["detail"] == (
                    f"forgetful.{function} failed: {where}{name} was called without await, so it "
                    "did nothing; write await before the call."
                )
            assert (await platform.call("forgetful.leave")).json() == 1
            assert (await platform.call("forgetful.collect")).is_success
    events = [line for line in logged if line["event"] == "a coroutine was never awaited"]
    assert [line["coroutine"] for line in events][-1] == "RemoteLog.tail"


async def test_no_amount_of_output_stops_the_worker_that_writes_it(tmp_path: Path) -> None:
    """4 MiB in short lines and undecodable bytes: far more than a pipe holds."""
    with structlog.testing.capture_logs() as logged:
        async with running(tmp_path, workers=1, worker_output_lines_per_s_max=50) as platform:
            assert (await platform.deploy("loud", _HOSTILE_OUTPUT)).is_success
            for name in ("loud.any_bytes", "loud.flood", "loud.any_bytes", "loud.flood"):
                answer = await asyncio.wait_for(platform.call(name), 120)
                assert answer.json() is None, answer.text
    dropped = sum(
        reported["lines"] for reported in logged if reported["event"] == "worker output dropped"
    )
    assert dropped > 2 * 64 * 32_768 - 5_000


@pytest.mark.repeated("tests/unit/compute/workers/test_output.py")
async def test_a_printed_line_names_its_application_and_invocation(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logged:
        async with running(tmp_path, workers=1) as platform:
            await platform.deploy("loud", _HOSTILE_OUTPUT)
            invocation = (await platform.call("loud.speaks")).json()
    lines = [
        reported for reported in logged if "spoken" in (reported["event"], reported.get("line"))
    ]
    assert [(line["application"], line["invocation"]) for line in lines] == 2 * [
        ("loud", invocation)
    ]
    assert {line["worker"] for line in lines} == {0}


async def test_a_busy_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    busy = DEMO + "\n@app.function\nasync def busy() -> None:\n    while True: pass\n"
    lost = asyncio.Event()
    worker = await process.start(
        0,
        LIMITS,
        directory=tmp_path / "0",
        threads_max=4,
        functions=NodeConfig().functions,
        serve=lambda *_: None,
        on_lost=lambda _: lost.set(),
    )
    assert await worker.until_ready()
    assert isinstance(await worker.link.ask(Load(1, None, {"demo.py": busy})), Loaded)
    worker.link.post(Invoke(1, "busy", b"", "i-1", 0, 0), lambda _: None)
    await asyncio.sleep(0)
    worker.close_stdin()  # as the end of this process would
    await asyncio.wait_for(lost.wait(), 120)
    assert await worker.stopped() == 1


async def test_a_blocked_worker_does_not_delay_the_end_of_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is killed at once, without the usual time to end by itself."""
    monkeypatch.setattr(pool, "STOP_S", math.inf)
    source = DEMO.replace("timeout_s=5)", "timeout_s=600)")
    async with running(tmp_path, workers=1) as platform:
        await platform.deploy("demo", source)
        call = asyncio.ensure_future(platform.call("demo.blocks_loop"))
        async with indilog.connect(platform.url) as client:
            assert await client.log("gate").read_next("here", wait=100) is not None
        [worker] = platform.host.status()["workers"]
        stopping = asyncio.ensure_future(platform.host.stop())
        assert (await call).json()["title"] == "WorkerCrashedError"
        await stopping
    with pytest.raises(ProcessLookupError):
        os.kill(worker["pid"], 0)


HOLDS = """
import os
import indilog

app = indilog.App("holds")

@app.function(timeout_s=300)
async def hold(ctx: indilog.Context, name: str) -> int:
    await ctx.log("held").append(b"%d" % os.getpid(), tags=[name])
    await ctx.log("held").read_next("release-" + name, wait=300)
    return os.getpid()
"""


@pytest.mark.repeated("tests/unit/compute/workers/test_scale.py")
async def test_workers_are_added_while_calls_wait_and_removed_after_their_calls(
    tmp_path: Path,
) -> None:
    limits = {"workers": 1, "workers_max": 3, "worker_calls_max": 2, "workers_idle_s": 0.2}
    async with running(tmp_path, **limits) as platform, asyncio.timeout(300):
        await platform.deploy("holds", HOLDS)

        def workers() -> dict[int, int]:
            return {w["index"]: w["pid"] for w in platform.host.status()["workers"]}

        assert len(workers()) == 1
        async with indilog.connect(platform.url) as client:
            log = client.log("held")
            calls = {
                name: asyncio.ensure_future(platform.call("holds.hold", name=name))
                for name in "abcdef"
            }
            runs_in = {}
            for name in calls:
                begun = await log.read_next(name, wait=300)
                assert begun is not None
                runs_in[name] = int(begun.data)
            assert set(runs_in.values()) == set(workers().values())
            assert sorted(workers()) == [0, 1, 2]
            last = workers()[2]
            kept = next(name for name, pid in runs_in.items() if pid == last)
            for name in calls.keys() - {kept}:
                await log.append(b"", tags=["release-" + name])
                assert (await calls[name]).json() == runs_in[name]
            await until(lambda: 2 not in workers())
            os.kill(last, 0)  # it runs until its call has ended
            await log.append(b"", tags=["release-" + kept])
            assert (await calls[kept]).json() == last
            await until(lambda: not Path(f"/proc/{last}").exists() and sorted(workers()) == [0])
            again = await platform.call("holds.hold", name="a")
            assert again.json() == workers()[0]
            assert platform.host.status()["worker_restarts"] == 0
