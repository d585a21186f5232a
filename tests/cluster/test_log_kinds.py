"""Kinds of log in a platform of processes: HTTP, commands, functions, switches, kill -9."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from indilog.base.errors import WrongStateError
from indilog.base.log import Log, Record
from indilog.remote_client import connect
from tests.cluster.platform_process import ROOT, platform

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

APP = """
from indilog import App, Context

app = App("shop")

@app.function
async def note(ctx: Context, data: str) -> int:
    log = ctx.log("events")
    await log.append(data.encode(), tags=["t"])
    return len(await log.read_range("t"))
"""


WRITER = """
import asyncio, sys
from indilog.remote_client import connect

async def main() -> None:
    async with connect(sys.argv[1]) as client:
        log = client.log("orders")
        for number in range(int(sys.argv[2])):
            print(await log.append(b"%d" % number, tags=["t"]), flush=True)

asyncio.run(main())
"""


def command(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "indilog", "log", *words, "--url", url],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.repeated("tests/cells/test_switches.py")
async def test_a_log_is_switched_while_it_is_used(tmp_path: Path) -> None:
    async with asyncio.timeout(350):
        with platform(tmp_path, "--nodes", "3") as first:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRITER, first.url, "150",
                cwd=ROOT, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            async with connect(first.url) as client:
                log = client.log("orders")
                following = asyncio.create_task(_first(log, 150))
                await process.stdout.readline()
                for kind in ("object-store", "shared", "object-store"):
                    said = await asyncio.to_thread(
                        command, first.url, "switch", "orders", "--kind", kind
                    )
                    assert said.stdout == f"The log orders is of kind {kind}.\n", said.stderr
                await process.communicate()
                followed = await following
                assert [record.data for record in followed] == [b"%d" % n for n in range(150)]
                tail = await log.tail()
            first.kill_everything()
        with platform(tmp_path, "--nodes", "3") as second:
            async with connect(second.url) as client:
                log = client.log("orders")
                assert await log.read_range("t") == followed
                assert await log.tail() == tail
                assert (await client.switch_log("orders", "shared")).kind == "shared"
                assert await log.append(b"last", tags=["t"]) >= tail
            refused = command(second.url, "switch", "orders", "--kind", "tape")
            assert refused.returncode == 2
            assert "object-store, order-first, owned, not 'tape'" in refused.stderr


async def _first(log: Log, count: int) -> list[Record]:
    found: list[Record] = []
    async for record in log.subscribe("t"):
        found.append(record)
        if len(found) == count:
            return found
    raise AssertionError("a subscription does not end")


@pytest.mark.repeated("tests/cells/test_log_kinds.py")
async def test_a_log_in_a_directory_survives_kill_9_of_all_processes(tmp_path: Path) -> None:
    async with asyncio.timeout(350):
        with platform(tmp_path, "--processes") as first:
            said = command(first.url, "create", "events", "--kind", "object-store")
            assert said.stdout == "The log events is of kind object-store.\n", said.stderr
            async with connect(first.url) as client:
                await client.deploy({"app.py": APP})
                noted = [await client.call("shop.note", data=str(n)) for n in range(5)]
                assert noted == [1, 2, 3, 4, 5]
                with pytest.raises(WrongStateError, match="is of kind object-store"):
                    await client.create_log("events")
            first.kill_everything()
        with platform(tmp_path, "--processes") as second:
            async with connect(second.url) as client:
                (info,) = await client.logs()
                assert (info.log, info.kind) == ("events", "object-store")
                data = [record.data for record in await client.log("events").read_range("t")]
                assert data == [b"%d" % n for n in range(5)]
                assert await client.call("shop.note", data="5") == 6
            listed = command(second.url, "list")
            assert listed.stdout.startswith("events  object-store  20"), listed.stderr
            refused = command(second.url, "create", "x", "--kind", "tape")
            assert refused.returncode == 2
            assert "one of shared, object-store, order-first, owned, not 'tape'" in refused.stderr
    assert list((tmp_path / "objects").glob("events-*/cells/*/*"))


@pytest.mark.repeated("tests/cells/test_owned_logs.py")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--processes",), id="--processes"),
        pytest.param(("--nodes", "3"), id="--nodes 3", marks=pytest.mark.repeated),
    ],
)
async def test_a_log_on_storage_nodes_survives_kill_9_of_all_processes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    async with asyncio.timeout(350):
        with platform(tmp_path, *options) as first:
            said = command(first.url, "create", "events", "--kind", "order-first")
            assert said.stdout == "The log events is of kind order-first.\n", said.stderr
            async with connect(first.url) as client:
                await client.deploy({"app.py": APP})
                noted = [await client.call("shop.note", data=str(n)) for n in range(5)]
                assert noted == [1, 2, 3, 4, 5]
            first.kill_everything()
        with platform(tmp_path, *options) as second:
            async with connect(second.url) as client:
                data = [record.data for record in await client.log("events").read_range("t")]
                assert data == [b"%d" % n for n in range(5)]
                assert await client.call("shop.note", data="5") == 6
