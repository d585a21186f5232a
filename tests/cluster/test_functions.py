"""Functions end to end: worker processes, gateway, clients, over the embedded platform's log."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

import indilog
from compute.gateway import GatewayServer, create_gateway
from compute.workers import process
from compute.workers.host import FunctionHost
from indilog.calls import Invoke, Load, Loaded
from indilog.config import MIB, ClusterConfig, Config, NodeConfig
from indilog.errors import CallOutcomeUnknownError
from indilog.runtime.assembly import embedded
from tests.link_pair import LIMITS

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

SOCIAL = '''
import indilog
from bokistore import Store

app = indilog.App("social")

@app.function
async def follow(ctx: indilog.Context, user: str, other: str) -> int:
    """Make `user` follow `other`; return how many people `user` follows now."""
    async with Store(ctx.log("social")).transaction() as txn:
        me, them = await txn.get(f"user:{user}"), await txn.get(f"user:{other}")
        me.add_to_set("follows", other)
        them.add_to_set("followers", user)
        return len(me["follows"])
'''
DEMO = """
import os, asyncio, time
import indilog

app = indilog.App("demo")

@app.function
async def count(ctx: indilog.Context, name: str) -> int:
    log = ctx.log("counts")
    await log.append(b"1", tags=[name])
    return len(await log.read_range(name))

@app.function
async def follow_two(ctx: indilog.Context, user: str) -> list[int]:
    return [await ctx.call("social.follow", user=user, other=o) for o in ("x", "y")]

@app.function
async def fan_out(ctx: indilog.Context, width: int) -> list[int]:
    return await ctx.map(sync_child, [{"n": n} for n in range(width)])

@app.function
def sync_child(ctx: indilog.Context, n: int) -> int:
    ctx.wait(ctx.log("children").append(b"%d" % n))
    return n

@app.function
async def writes_in_child(ctx: indilog.Context) -> list[str]:
    await ctx.call(sync_child, n=5)
    return [r.data.decode() for r in await ctx.log("children").read_range()]

@app.function
async def crash(ctx: indilog.Context) -> None:
    await ctx.log("crashes").append(b"x")
    os._exit(3)

@app.function
async def wait_for_release(ctx: indilog.Context) -> str:
    await ctx.log("gate").append(b"here", tags=["here"])
    record = await ctx.log("gate").read_next("release", wait=60)
    return record.data.decode() + VERSION

@app.function
async def recurse(ctx: indilog.Context, n: int) -> int:
    return await ctx.call(recurse, n=n + 1)

@app.function(timeout_s=0.05)
async def slow() -> None:
    await asyncio.sleep(60)

@app.function
async def prints() -> int:
    print("spoken")
    return 1

VERSION = " by version 1"
"""


class Platform:
    """A compute node on an embedded platform, and a client over HTTP."""

    def __init__(self, host: FunctionHost, url: str, http: httpx.AsyncClient) -> None:
        self.host = host
        self.url = url
        self.http = http

    async def deploy(self, app: str, source: str) -> httpx.Response:
        headers = {"content-type": "text/x-python"}
        return await self.http.put(f"/apps/{app}", content=source, headers=headers)

    async def call(self, name: str, /, **arguments: object) -> httpx.Response:
        return await self.http.post(f"/functions/{name.replace('.', '/')}", json=arguments)


@asynccontextmanager
async def running(
    directory: Path, *, workers: int, worker_calls_max: int = 256, import_timeout_s: float = 30.0
) -> AsyncIterator[Platform]:
    config = Config(
        cluster=ClusterConfig(durability="memory"),
        node=NodeConfig(
            data_dir=directory,
            port=0,
            segment_bytes=8 * MIB,
            workers=workers,
            worker_calls_max=worker_calls_max,
            import_timeout_s=import_timeout_s,
        ),
    )
    async with embedded(config) as there:
        host = FunctionHost(config, there.logs)
        app = create_gateway(host, there.logs, lambda: {"ready": True}, config)
        limit = config.cluster.message_bytes_max
        server = GatewayServer(app, config.node.host, 0, message_bytes_max=limit)
        await host.start()
        try:
            await server.start()
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                yield Platform(host, url, http)
        finally:
            await server.stop()
            await host.stop()


@pytest_asyncio.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with running(tmp_path, workers=2) as there:
        assert (await there.deploy("demo", DEMO)).status_code == 200
        yield there


async def command(platform: Platform, *arguments: str) -> tuple[int | None, str, str]:
    """Run `indilog` as a person would."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "indilog", *arguments, "--url", platform.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_function_of_the_interface_is_deployed_called_changed_and_called_by_another(
    platform: Platform, tmp_path: Path
) -> None:
    (tmp_path / "social.py").write_text(SOCIAL)
    code, out, _ = await command(platform, "deploy", str(tmp_path / "social.py"))
    assert (code, out) == (0, "Deployed social, version 1: follow.\n")
    assert (await platform.call("social.follow", user="ann", other="bob")).json() == 1
    code, out, _ = await command(platform, "invoke", "social.follow", "user=ann", "other=eve")
    assert (code, out) == (0, "2\n")
    assert (await platform.call("demo.follow_two", user="ann")).json() == [3, 4]
    (tmp_path / "social.py").write_text(SOCIAL.replace('len(me["follows"])', "-1"))
    code, out, _ = await command(platform, "deploy", str(tmp_path / "social.py"))
    assert (code, out) == (0, "Deployed social, version 2: follow.\n")
    assert (await platform.call("social.follow", user="ann", other="bob")).json() == -1
    (tmp_path / "social.py").write_text("import nowhere")
    code, _, err = await command(platform, "deploy", str(tmp_path / "social.py"))
    assert (code, err) == (
        2,
        "social.py, line 1: ModuleNotFoundError: No module named 'nowhere'.\n",
    )
    assert (await platform.call("social.follow", user="ann", other="bob")).json() == -1
    code, _, err = await command(platform, "invoke", "social.follow", "user=ann")
    assert (code, err) == (2, "social.follow was not run: field 'other' is missing.\n")
    code, _, err = await command(platform, "invoke", "social.folow", "user=ann")
    assert (code, err) == (2, "App social has no function 'folow'; did you mean 'follow'?\n")


async def test_deployments_and_records_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as first:
        await first.deploy("demo", DEMO)
        await first.deploy("demo", DEMO.replace("version 1", "version 2"))
        assert (await first.call("demo.count", name="a")).json() == 1
    async with running(tmp_path, workers=1) as second:
        assert [(a.name, a.version) for a in second.host.apps()] == [("demo", 2)]
        assert (await second.call("demo.count", name="a")).json() == 2


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
        (
            "import os\nos._exit(7)\n",
            "bad.py, line 2: importing the code ends the Python process (exit status 7).",
        ),
        (
            "import ctypes\n\nctypes.string_at(0)\n",
            "bad.py, line 3: importing the code ends the Python process (SIGSEGV).",
        ),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "At module level importing the code ends the Python process (SIGKILL).",
        ),
        (
            "n = 0\nwhile True:\n    n += 1\n",
            "bad.py, line 3: the code did not import within 2 s; move work out of module level.",
        ),
        ("raise KeyboardInterrupt\n", "bad.py, line 1: KeyboardInterrupt."),
    ],
)
async def test_code_whose_import_harms_its_process_harms_no_running_call(
    tmp_path: Path, source: str, sentence: str
) -> None:
    async with running(tmp_path, workers=1, import_timeout_s=2.0) as platform:
        await platform.deploy("demo", DEMO)
        async with indilog.connect(platform.url) as client:
            waiting = asyncio.ensure_future(platform.call("demo.wait_for_release"))
            assert await client.log("gate").read_next("here", wait=30) is not None
            refused = await platform.deploy("bad", source)
            assert (refused.status_code, refused.json()["title"]) == (422, "DeployError")
            assert refused.json()["detail"].startswith(sentence[:12])
            assert refused.json()["detail"] == sentence
            await client.log("gate").append(b"released", tags=["release"])
            assert (await waiting).json() == "released by version 1"
        assert platform.host.status()["worker_restarts"] == 0
        assert sorted(p.name for p in (tmp_path / "workers").iterdir()) == ["0"]


async def test_an_app_that_no_longer_imports_stops_neither_start_nor_the_others(
    tmp_path: Path,
) -> None:
    """Its import ends workers, a bounded number of them; then it is left out and its calls say
    why.
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
            "process (exit status 5)."
        )
        assert second.host.status()["worker_restarts"] <= 2


async def test_a_killed_worker_fails_its_calls_at_once(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        waiting = asyncio.ensure_future(platform.call("demo.wait_for_release"))
        assert await client.log("gate").read_next("here", wait=30) is not None
        for worker in platform.host.status()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        assert (await waiting).json()["title"] == "WorkerCrashedError"
        again = asyncio.ensure_future(platform.call("demo.wait_for_release"))  # waits for a worker
        await client.log("gate").append(b"released", tags=["release"])
        assert (await again).json() == "released by version 1"


async def test_running_calls_end_on_their_version_and_new_ones_get_the_new(
    platform: Platform,
) -> None:
    async with indilog.connect(platform.url) as client:
        old = asyncio.ensure_future(platform.call("demo.wait_for_release"))
        assert await client.log("gate").read_next("here", wait=30) is not None
        await platform.deploy("demo", DEMO.replace("version 1", "version 2"))
        await client.log("gate").append(b"released", tags=["release"])
        assert (await old).json() == "released by version 1"
        assert (await platform.call("demo.wait_for_release")).json() == "released by version 2"


async def test_parents_that_hold_every_slot_do_not_lock_up(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, worker_calls_max=2) as platform:
        await platform.deploy("demo", DEMO)
        answers = await asyncio.gather(*(platform.call("demo.fan_out", width=2) for _ in range(4)))
        assert [a.json() for a in answers] == [[0, 1]] * 4


async def test_a_parent_sees_what_its_child_wrote(platform: Platform) -> None:
    for n in range(1, 4):
        assert (await platform.call("demo.writes_in_child")).json() == ["5"] * n


async def test_calls_without_end_are_stopped(platform: Platform) -> None:
    answer = await platform.call("demo.recurse", n=0)
    assert answer.status_code == 500
    assert "call each other without end" in answer.json()["detail"]


async def test_an_asynchronous_call_can_be_asked_for(platform: Platform) -> None:
    answer = await platform.http.post(
        "/functions/demo/count?async=1&delay=0.01", json={"name": "a"}
    )
    assert answer.status_code == 202
    told = await platform.http.get(f"{answer.headers['location']}?wait=60")
    assert (told.json()["state"], told.json()["result"]) == ("done", 1)
    answer = await platform.http.post("/functions/demo/slow?async=1")
    told = await platform.http.get(f"{answer.headers['location']}?wait=60")
    assert told.json()["state"] == "failed"
    assert told.json()["problem"]["title"] == "CallOutcomeUnknownError"


async def test_a_client_calls_deploys_and_reads_in_one_session(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        assert await client.call("demo.count", name="c") == 1
        assert client.session.position > 0
        assert [r.data async for r in _first(client.log("counts").subscribe("c"), 1)] == [b"1"]
        info = await client.deploy({"other.py": DEMO.replace('"demo"', '"other"')})
        assert (info.name, info.version) == ("other", 1)
        assert await client.call("other.count", name="c") == 2
        with pytest.raises(CallOutcomeUnknownError, match=r"did not end within 0\.05 s"):
            await client.call("demo.slow")
        with pytest.raises(indilog.UnknownFunctionError):
            await client.call("demo.nothing")


async def _first(
    records: AsyncIterator[indilog.Record], count: int
) -> AsyncIterator[indilog.Record]:
    async for record in records:
        yield record
        count -= 1
        if count == 0:
            return


async def test_a_client_that_was_cut_off_connects_again(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        await client.log("orders").append(b"1")
        client.drop()
        await client.log("orders").append(b"2")
        assert [r.data for r in await client.log("orders").read_range()] == [b"1", b"2"]


async def test_nobody_at_the_other_end_is_one_sentence() -> None:
    with pytest.raises(indilog.NotReadyError, match="No platform answers at"):
        async with indilog.connect("http://127.0.0.1:1"):
            pass


async def test_a_port_in_use_is_one_sentence(platform: Platform) -> None:
    port = int(platform.url.rpartition(":")[2])
    server = GatewayServer(lambda *_: asyncio.sleep(0), "127.0.0.1", port, message_bytes_max=1)
    with pytest.raises(indilog.ConfigError, match=f"Port {port} is in use"):
        await server.start()


async def test_a_stream_tells_history_and_goes_on(platform: Platform) -> None:
    post = platform.http.post
    await post("/logs/orders/records", json={"data": "1", "tags": ["a"]})
    async with platform.http.stream("GET", "/logs/orders/stream?tag=a") as stream:
        lines = stream.aiter_lines()
        seen = [line async for line in _until(lines, "data:")]
        await post("/logs/orders/records", json={"data": "2", "tags": ["a"]})
        seen += [line async for line in _until(lines, "data:")]
    data = [line for line in seen if line.startswith("data:")]
    assert ['"data":"1"' in data[0], '"data":"2"' in data[1]] == [True, True]


async def _until(lines: AsyncIterator[str], start: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        if line.startswith(start):
            return


async def test_every_deployed_function_is_described(platform: Platform) -> None:
    paths = (await platform.http.get("/openapi.json")).json()["paths"]
    assert "/functions/demo/count" in paths
    await platform.deploy("late", DEMO)
    assert "/functions/late/count" in (await platform.http.get("/openapi.json")).json()["paths"]


async def test_an_app_of_another_owner_is_not_replaced(platform: Platform) -> None:
    headers = {"content-type": "text/x-python", "indilog-owner": "eve"}
    answer = await platform.http.put("/apps/demo", content=DEMO, headers=headers)
    assert (answer.status_code, answer.json()["title"]) == (409, "AppNameTakenError")


async def test_workers_are_gone_when_the_host_is(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as platform:
        pids = [worker["pid"] for worker in platform.host.status()["workers"]]
        assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (tmp_path / "workers").exists()


async def test_a_busy_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    busy = DEMO + "\n@app.function\nasync def busy() -> None:\n    while True: pass\n"
    lost = asyncio.Event()
    worker = await process.start(
        0,
        LIMITS,
        directory=tmp_path / "0",
        threads_max=4,
        serve=lambda *_: None,
        on_lost=lambda _: lost.set(),
    )
    assert await worker.until_ready()
    assert isinstance(await worker.link.ask(Load(1, None, {"demo.py": busy})), Loaded)
    worker.link.post(Invoke(1, "busy", b"", "i-1", 0, 0), lambda _: None)
    await asyncio.sleep(0)
    worker.let_go()  # as the death of this process would
    await asyncio.wait_for(lost.wait(), 30)
    assert await worker.stopped() == 1
