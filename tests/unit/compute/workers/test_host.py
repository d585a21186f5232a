"""What the function host tells the parts of it of each other."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indilog.base.deployed import ScheduleSpec
from indilog.base.errors import (
    DeployError,
    OverloadedError,
    UnknownFunctionError,
)
from indilog.config import Config, node_config
from indilog.link.link_messages import Failed, Returned
from indilog.runtime import descriptors
from indilog.testing import MemoryLogs
from indilog_compute.deployments import Deployment
from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.host import FunctionHost

pytestmark = pytest.mark.asyncio


async def test_schedules_of_an_application_that_does_not_load_wait_until_it_does(
    tmp_path: Path,
) -> None:
    """Otherwise each due time would be one more call that stays open."""
    host = FunctionHost(Config(node=node_config(workers=0, data_dir=tmp_path)), MemoryLogs())
    spec = ScheduleSpec("f", "* * * * *")
    record = Deployment(
        name="app", version=1, owner="me", sources={}, functions=(), schedules=(spec,)
    )
    deployed = DeployedApp(1, record, 0, {spec: 0.0})
    host._applications._replace(deployed)
    await host._invocations.start()  # watches schedules once it knows the time of the log
    try:
        watched = [reported["schedule"] for reported in host.status()["schedules"]]
        assert watched == ["app.f * * * * * UTC"]
        host._applications._note_load_failure(deployed, DeployError("No."))
        assert host.status()["schedules"] == []
    finally:
        await host._invocations.stop()


async def test_a_known_key_is_answered_without_worker_function_or_log_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FunctionHost(Config(node=node_config(workers=0, data_dir=tmp_path)), MemoryLogs())
    invocations = host._invocations
    await invocations.start()
    try:
        known = await invocations.accept("app.f", b"{}", key="k", delay_s=60)
        with pytest.raises(UnknownFunctionError):
            await host.send("app.f", b"{}", key="other")
        with monkeypatch.context() as patched:
            patched.setattr(invocations, "_log", None)
            assert await host.accept_once("app.f", b"{}", key="k") == known
            assert await host.send("app.f", b"{ }", key="k") == known
            with pytest.raises(UnknownFunctionError):
                await host.send("app.f", b"{}")
    finally:
        await invocations.stop()


SLOW = """
import asyncio
import indilog
app = indilog.App("greedy")
@app.function
async def slow(ctx) -> None:
    await asyncio.sleep(3600)
"""
QUICK = """
import indilog
app = indilog.App("modest")
@app.function
async def quick(ctx) -> int:
    return 7
"""


async def test_an_application_with_a_thousand_slow_calls_does_not_stop_another(
    tmp_path: Path,
) -> None:
    """The other application's plain calls, recorded calls, and waits for outcomes continue."""
    node = node_config(
        workers=1,
        worker_calls_max=20,
        calls_pending_max=2_000,
        invocations_running_max=10,
        data_dir=tmp_path,
    )
    host = FunctionHost(Config(node=node), MemoryLogs())
    await host.start()
    try:
        await host.deploy({"app.py": SLOW})
        await host.deploy({"app.py": QUICK})
        for _ in range(30):
            await host.send("greedy.slow", b"{}")
        while sum(host.status()[kind] for kind in ("calls_running", "calls_waiting")) < 30:  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.01)
        greedy = [host.call("greedy.slow", b"{}") for _ in range(970)]
        with pytest.raises(OverloadedError, match="1,000 calls of app greedy"):
            host.call("greedy.slow", b"{}")
        async with asyncio.timeout(60):
            answers = [host.call("modest.quick", b"{}") for _ in range(50)]
            for answer in answers:
                assert await answer.outcome == Returned(0, b"7")
            accepted = await host.send("modest.quick", b"{}", delay_s=0.01)
            reported = await host.invocation(accepted, wait_s=30)
        assert reported is not None
        assert reported.outcome is not None
        assert host.status()["calls_running"] == 18
        assert not any(call.outcome.done() for call in greedy)
        host._router.check_invariants()
        await host.undeploy("modest")
        host._router.check_invariants()
        assert host.status()["calls_running"] == 20, "alone, an application has all slots"
    finally:
        await host.stop()


LIMITED = """
import resource
import indilog
app = indilog.App("limited")
@app.function
async def limit(ctx) -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""


async def test_functions_have_the_limit_of_open_files_that_the_platform_was_started_with(
    tmp_path: Path,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, before[1]))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(descriptors, "_given", [])
            descriptors.raise_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
            host = FunctionHost(
                Config(node=node_config(workers=1, data_dir=tmp_path)), MemoryLogs()
            )
            await host.start()
            try:
                await host.deploy({"app.py": LIMITED})
                assert await host.call("limited.limit", b"{}").outcome == Returned(0, b"700")
            finally:
                await host.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


GREEDY = """
import os
import time
import indilog
KEPT = []
app = indilog.App("greedy")
@app.function
async def take(ctx, mib: int) -> int:
    return len(bytearray(mib << 20))
@app.function
def sleep(ctx) -> None:
    time.sleep(0.2)
@app.function
async def keep(ctx) -> int:
    while True:
        KEPT.append(bytearray(1 << 20))
@app.function
async def hold(ctx, mib: int) -> None:
    KEPT.append(bytearray(mib << 20))
@app.function
async def pid(ctx) -> int:
    return os.getpid()
"""


async def replaced(host: FunctionHost, pids: list[int]) -> None:
    """Wait until other workers than those with `pids` run."""
    async with asyncio.timeout(60):
        while [worker.pid for worker in host._pool.workers] in (pids, []):  # noqa: ASYNC110 - none announces it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def limited_host(data_dir: Path) -> AsyncIterator[tuple[FunctionHost, list[int]]]:
    """Run a host whose only worker may have 256 MiB; yield also the ids of its processes."""
    settings = node_config(workers=1, data_dir=data_dir, worker_memory_bytes_max=256 << 20)
    host = FunctionHost(Config(node=settings), MemoryLogs())
    await host.start()
    try:
        yield host, [worker.pid for worker in host._pool.workers]
    finally:
        await host.stop()


FILLING = """
import asyncio
import threading
import bokiflow
import indilog
from bokistore import Store
KEPT = []
FILLS_SERVICE = threading.Event()
app = indilog.App("filling")
flow = bokiflow.Flow(app, lease=1.0)
def fill():
    while True:
        KEPT.append(bytearray(1 << 20))
async def fill_later():
    fill()
@flow.workflow
async def in_step(wf: bokiflow.Workflow) -> str:
    try:
        return await wf.step(fill, retries=1)
    except bokiflow.StepFailedError as error:
        return str(error)
@flow.workflow
async def in_workflow(wf: bokiflow.Workflow) -> None:
    fill()
@flow.workflow
async def harmless(wf: bokiflow.Workflow) -> int:
    return len(await wf.step(lambda: "x" * (32 << 10)))
@app.function
async def run(ctx, name: str) -> str:
    try:
        return str(await (await globals()[name].start()).result(30))
    except bokiflow.RunFailedError as error:
        return str(error)
@flow.workflow
async def in_transaction(wf: bokiflow.Workflow) -> str:
    async def body(txn) -> None:
        fill()
    try:
        return await wf.transact(Store(wf.log("things")), body)
    except bokiflow.StepFailedError as error:
        return str(error)
@app.service
async def in_service(ctx) -> None:
    while not FILLS_SERVICE.is_set():
        await asyncio.sleep(0.01)
    FILLS_SERVICE.clear()
    fill()
@app.function
async def begin_service(ctx) -> None:
    FILLS_SERVICE.set()
@app.function
async def begin_task(ctx) -> None:
    asyncio.create_task(fill_later())
@app.function
async def begin_thread(ctx) -> None:
    threading.Thread(target=fill).start()
"""


@pytest.mark.parametrize(
    "where",
    ["in_step", "in_transaction", "in_workflow", "begin_service", "begin_task", "begin_thread"],
)
async def test_a_worker_whose_memory_any_code_has_used_up_is_replaced(
    tmp_path: Path, where: str
) -> None:
    async with limited_host(tmp_path) as (host, pids):
        await host.deploy({"app.py": FILLING})
        if where.startswith("begin"):
            assert isinstance(await host.call(f"filling.{where}", b"{}").outcome, Returned)
        else:
            outcome = await host.call("filling.run", b'{"name": "%s"}' % where.encode()).outcome
            assert "MemoryError" in str(outcome)
        await replaced(host, pids)
        outcome = await host.call("filling.run", b'{"name": "harmless"}').outcome
        assert isinstance(outcome, Returned)
        assert outcome.result == b'"32768"'


LARGE = """
import indilog
kept = bytearray(%d << 20)
app = indilog.App("large")
@app.function
async def size(ctx) -> int:
    return len(kept)
"""


async def test_a_worker_without_memory_to_import_an_application_is_replaced(tmp_path: Path) -> None:
    async with limited_host(tmp_path) as (host, pids):
        await host.deploy({"app.py": GREEDY})
        held = await host.call("greedy.hold", b'{"mib": 160}').outcome
        assert isinstance(held, Returned)
        with pytest.raises(DeployError, match="MemoryError"):
            await host.deploy({"app.py": LARGE % 160})
        await replaced(host, pids)
        await host.deploy({"app.py": LARGE % 160})
        assert await host.call("large.size", b"{}").outcome == Returned(0, b"167772160")


async def test_a_worker_is_not_replaced_for_memory_that_the_next_one_needs_too(
    tmp_path: Path,
) -> None:
    async with limited_host(tmp_path) as (host, pids):
        await host.deploy({"app.py": GREEDY})
        await host.deploy({"app.py": LARGE % 170})
        outcome = await host.call("greedy.take", b'{"mib": 200}').outcome
        assert "MemoryError" in str(outcome)
        found = await host.call("greedy.pid", b"{}").outcome  # answered after the check
        assert found == Returned(0, b"%d" % pids[0])
        assert [worker.pid for worker in host._pool.workers] == pids


async def test_a_call_that_needs_more_memory_than_its_worker_may_have_fails_alone(
    tmp_path: Path,
) -> None:
    settings = node_config(workers=1, data_dir=tmp_path, worker_memory_bytes_max=256 << 20)
    host = FunctionHost(Config(node=settings), MemoryLogs())
    await host.start()
    try:
        await host.deploy({"app.py": GREEDY})
        pids = [worker.pid for worker in host._pool.workers]
        outcome = await host.call("greedy.take", b'{"mib": 600}').outcome
        assert isinstance(outcome, Failed)
        assert "MemoryError" in outcome.message
        slow = [host.call("greedy.sleep", b"{}").outcome for _ in range(100)]
        assert set(await asyncio.gather(*slow)) == {Returned(0, b"null")}, "stacks do not count"
        assert await host.call("greedy.take", b'{"mib": 16}').outcome == Returned(0, b"16777216")
        assert [worker.pid for worker in host._pool.workers] == pids
        outcome = await host.call("greedy.keep", b"{}").outcome
        assert isinstance(outcome, Failed)
        await replaced(host, pids)
        found = await host.call("greedy.pid", b"{}").outcome
        assert isinstance(found, Returned)
        assert int(found.result) not in pids, "the worker was replaced"
    finally:
        await host.stop()


GARBAGE = """
import gc
import indilog
app = indilog.App("garbage")
@app.function
async def kept(ctx) -> int:
    return gc.get_freeze_count() if gc.get_threshold()[0] > 700 else 0
"""


async def test_a_worker_keeps_what_it_has_imported_out_of_collections(tmp_path: Path) -> None:
    host = FunctionHost(Config(node=node_config(workers=1, data_dir=tmp_path)), MemoryLogs())
    await host.start()
    try:
        await host.deploy({"app.py": GARBAGE})
        outcome = await host.call("garbage.kept", b"{}").outcome
        assert isinstance(outcome, Returned)
        assert int(outcome.result) > 30_000
    finally:
        await host.stop()
