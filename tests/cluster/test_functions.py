"""Functions end to end: worker processes, gateway, clients, over the embedded platform's log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

import indilog
from indilog.base.errors import CallOutcomeUnknownError
from indilog.base.ids import NodeId
from indilog.cli.commands import app
from indilog.config import KIB, MIB, node_config
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.cluster.gateway_port import keep_port, port_of
from indilog_compute.gateway import GatewayServer
from tests.cluster.function_platform import (
    DEMO,
    Platform,
    config_in,
    running,
    running_two,
    served,
    until,
)
from tests.support.clients import command_clients_closed
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

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
LOGGED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*\n", re.MULTILINE)
"""What the platform, which is in the same process, prints during a command."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def platform(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    """Run one platform for all tests that do not need one of their own."""
    async with running(tmp_path_factory.mktemp("functions"), workers=2) as there:
        assert (await there.deploy("demo", DEMO)).status_code == 200
        yield there


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Platform, Platform]]:
    """Run one platform of two compute nodes for all tests that need two."""
    async with running_two(tmp_path_factory.mktemp("nodes")) as both:
        yield both


async def command(platform: Platform, *arguments: str) -> tuple[int, str, str]:
    """Run a command of `indilog` in this process; return its code, output and errors."""
    given = [*arguments, "--url", platform.url]
    with command_clients_closed():
        done = await asyncio.to_thread(CliRunner().invoke, app, given)
    return done.exit_code, re.sub(LOGGED, "", done.stdout), done.stderr


async def test_a_function_is_deployed_called_changed_and_called_by_another(
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


async def test_running_calls_end_on_their_version_and_new_ones_get_the_new(
    platform: Platform,
) -> None:
    async with indilog.connect(platform.url) as client:
        old = asyncio.ensure_future(platform.call("demo.wait_for_release"))
        assert await client.log("gate").read_next("here", wait=100) is not None
        await platform.deploy("demo", DEMO.replace("version 1", "version 2"))
        await client.log("gate").append(b"released", tags=["release"])
        assert (await old).json() == "released by version 1"
        assert (await platform.call("demo.wait_for_release")).json() == "released by version 2"


async def test_a_client_takes_messages_as_large_as_its_platform_allows(tmp_path: Path) -> None:
    """A page of more than 16 MiB: the limit of a client that does not know the platform's limit."""
    base = config_in(tmp_path, workers=0)
    config = replace(
        base,
        cluster=replace(base.cluster, message_bytes_max=32 * MIB),
        node=node_config(base.node, page_bytes_max=24 * MIB),
    )
    async with (
        embedded(config) as there,
        served(config, there.logs) as platform,
        indilog.connect(platform.url) as client,
    ):
        log = client.log("large")
        for _ in range(6):
            await log.append_batch([indilog.Entry(bytes(MIB - KIB))] * 3)
        page = await log.read_range()
    assert len(page) == 18


async def test_parents_that_hold_every_slot_cause_no_deadlock(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, worker_calls_max=2) as platform:
        await platform.deploy("demo", DEMO)
        answers = await asyncio.gather(*(platform.call("demo.fan_out", width=2) for _ in range(4)))
        assert [a.json() for a in answers] == [[0, 1]] * 4


async def test_a_parent_sees_what_its_child_wrote(platform: Platform) -> None:
    for n in range(1, 4):
        assert (await platform.call("demo.writes_in_child")).json() == ["5"] * n


async def test_functions_that_call_each_other_without_end_are_stopped(platform: Platform) -> None:
    answer = await platform.call("demo.recurse", n=0)
    assert answer.status_code == 500
    assert "call each other endlessly" in answer.json()["detail"]


async def test_the_outcome_of_an_asynchronous_call_is_readable(platform: Platform) -> None:
    answer = await platform.http.post(
        "/functions/demo/count?async=1&delay=0.01", json={"name": "async"}
    )
    assert answer.status_code == 202
    reported = await platform.http.get(f"{answer.headers['location']}?wait=60")
    assert (reported.json()["state"], reported.json()["result"]) == ("done", 1)
    answer = await platform.http.post("/functions/demo/slow?async=1")
    reported = await platform.http.get(f"{answer.headers['location']}?wait=60")
    assert reported.json()["state"] == "failed"
    assert reported.json()["problem"]["title"] == "CallOutcomeUnknownError"


@pytest.mark.repeated("tests/unit/cli/test_commands.py")
async def test_the_outcome_of_an_asynchronous_call_is_shown_by_a_command(
    platform: Platform,
) -> None:
    code, out, _ = await command(platform, "invoke", "demo.count", "name=a", "--async")
    assert code == 0
    code, out, _ = await command(platform, "invocation", "show", out.strip(), "--wait", "1m")
    reported = json.loads(out)
    assert (code, reported["function"], reported["state"], reported["result"]) == (
        0,
        "demo.count",
        "done",
        1,
    )
    code, out, err = await command(platform, "invocation", "show", "i-1")
    assert (code, out) == (2, "")
    assert err == (
        "No invocation 'i-1' is known: it never existed, or its outcome is deleted (kept for "
        "86,400 s at most, results_kept_s).\n"
    )


async def test_an_asynchronous_call_whose_arguments_do_not_fit_is_refused_at_once(
    platform: Platform,
) -> None:
    answer = await platform.http.post("/functions/demo/count?async=1", json={"nmae": "a"})
    assert answer.status_code == 422
    assert [e["field"] for e in answer.json()["errors"]] == ["name", "nmae"]
    assert platform.host.status()["invocations"]["open"] == 0


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
        await client.log("cut off").append(b"1")
        client.drop()
        await client.log("cut off").append(b"2")
        assert [r.data for r in await client.log("cut off").read_range()] == [b"1", b"2"]


async def test_a_refused_connection_is_one_sentence() -> None:
    with pytest.raises(indilog.NotReadyError, match="No platform answers at"):
        async with indilog.connect("http://127.0.0.1:1"):
            pass


@pytest.mark.parametrize("chosen", [repeated(False), True])
async def test_a_port_in_use_is_one_sentence(
    platform: Platform, tmp_path: Path, *, chosen: bool
) -> None:
    """The sentence says where the port number comes from."""
    used = int(platform.url.rpartition(":")[2])
    engine = NodeId("engine-1")
    keep_port(tmp_path, engine, used)
    port = port_of(tmp_path, engine, 0 if chosen else used - 1)
    server = GatewayServer(lambda *_: asyncio.sleep(0), "127.0.0.1", port.port, port_is=port.words)
    where = "chosen for engine-1 at its first start" if chosen else r"port \+ 1 for engine-1"
    with pytest.raises(indilog.ConfigError, match=rf"Port {used} \({where}\) is in use on 127"):
        await server.start()


async def test_a_stream_yields_history_and_then_live_records(platform: Platform) -> None:
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


async def test_a_deployment_reaches_every_compute_node_at_once(
    nodes: tuple[Platform, Platform],
) -> None:
    first, second = nodes

    def versions() -> list[list[int]]:
        return [[app.version for app in p.host.apps() if app.name == "demo"] for p in nodes]

    await first.deploy("demo", DEMO)
    await until(lambda: versions() == [[1]] * 2)
    assert (await second.call("demo.count", name="a")).json() == 1
    await asyncio.gather(
        first.deploy("demo", DEMO.replace("version 1", "of one")),
        second.deploy("demo", DEMO.replace("version 1", "of the other")),
    )
    await until(lambda: versions() == [[3]] * 2)
    async with indilog.connect(first.url) as client:
        await client.log("gate").append(b"told", tags=["release"])
    reported = [(await p.call("demo.wait_for_release")).json() for p in nodes]
    assert reported[0] == reported[1]
    assert reported[0] in ("told by of one", "told by of the other")


async def test_a_deployment_that_crashes_workers_of_another_node_is_reported_there(
    nodes: tuple[Platform, Platform],
) -> None:
    """The code can be imported on the node where it was deployed, but not on the other node."""
    first, second = nodes
    deadly = "import os\nif '/two/' in __file__: os._exit(5)\n"
    await first.deploy("other", DEMO)
    assert (await first.deploy("deadly", deadly + DEMO)).status_code == 200
    await until(lambda: {"other", "deadly"} <= {app.name for app in second.host.apps()})
    assert (await first.call("deadly.count", name="b")).json() == 1
    refused = await second.call("deadly.count", name="b")
    assert refused.status_code == 503
    assert "deadly.py, line 2: importing the code ends" in refused.json()["detail"]
    assert (await second.call("other.count", name="b")).json() == 2
    assert second.host.status()["worker_restarts"] == 0


async def test_an_app_of_another_owner_is_not_replaced(platform: Platform) -> None:
    headers = {"content-type": "text/x-python", "indilog-owner": "eve"}
    answer = await platform.http.put("/apps/demo", content=DEMO, headers=headers)
    assert (answer.status_code, answer.json()["title"]) == (409, "AppNameTakenError")


async def test_a_client_may_send_and_request_more_at_once_than_one_message_holds(
    platform: Platform,
) -> None:
    """The writes of one iteration of a link are cut into messages within the receiver's limit."""
    async with indilog.connect(platform.url) as client:
        log = client.log("large")
        data = [bytes([number]) * 900_000 for number in range(20)]
        seqnums = await asyncio.gather(*(log.append(each) for each in data))
        records = await asyncio.gather(*(log.read(seqnum) for seqnum in seqnums))
        assert [record.data for record in records if record is not None] == data
