"""A3: kill -9 of all processes at once, during appends, loses no acknowledged record."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import httpx
import pytest

import indilog
from indilog.remote_client import RemoteClient
from tests.cluster.platform_process import PlatformProcess, platform
from tests.support.clients import token_headers
from tests.support.repeated import repeated

KILLS_PER_SEED = 1
CALLERS = 8
APP = '''
import indilog
from indilog.remote_client import RemoteClient

app = indilog.App("kept")

@app.function
async def count(ctx: indilog.Context) -> int:
    """Append one record; return how many are there now."""
    log = ctx.log("counted")
    await log.append(b"one")
    return len(await log.read_range())
'''


async def load(
    platform: PlatformProcess,
    name: str,
    enough: int,
    acknowledged: dict[int, bytes],
    *,
    callers: int = CALLERS,
) -> None:
    """Append from several callers; kill the platform meanwhile, once `enough` are acknowledged."""
    reached = asyncio.Event()

    async def call(client: RemoteClient, caller: int) -> None:
        log = client.log("load")
        for n in itertools.count():
            data = f"{name}-{caller}-{n}".encode()
            seqnum = await log.append(data, tags=[f"caller:{caller}"])
            assert seqnum not in acknowledged, "each seqnum is assigned once"
            acknowledged[seqnum] = data
            if len(acknowledged) >= enough:
                reached.set()

    async with indilog.connect(platform.url) as client:
        calls = [asyncio.create_task(call(client, caller)) for caller in range(callers)]
        async with asyncio.timeout(200):
            await reached.wait()
        platform.kill_everything()
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, indilog.IndilogError) for end in ends), ends


async def check(platform: PlatformProcess, acknowledged: dict[int, bytes], calls: int) -> None:
    async with indilog.connect(platform.url) as client:
        log = client.log("load")
        found: dict[int, bytes] = {}
        bound = 0
        while page := await log.read_range(bound=bound, limit=1000):
            found |= {record.seqnum: record.data for record in page}
            bound = page[-1].seqnum + 1
        lost = {s: data for s, data in acknowledged.items() if found.get(s) != data}
        assert not lost
        assert len(set(found.values())) == len(found), "no record is there twice"
        seqnums = range(await log.tail())
        for some in (seqnums[n : n + 128] for n in range(0, len(seqnums), 128)):
            read = await asyncio.gather(*map(log.read, some))
            assert {s for s, record in zip(some, read, strict=True) if record} == found.keys() & {
                *some
            }
        assert await client.call("kept.count") == calls, "functions are still deployed"


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, repeated(1)])
@pytest.mark.parametrize(
    "options", [repeated((), "embedded"), pytest.param(("--processes",), id="processes")]
)
def test_a_platform_killed_during_appends_finds_all_acknowledged_records(
    tmp_path: Path, options: tuple[str, ...], seed: int
) -> None:
    rng = random.Random(seed)
    acknowledged: dict[int, bytes] = {}
    for kill in range(KILLS_PER_SEED):
        with platform(tmp_path, *options) as running:
            if kill == 0:
                deploy(running.url)
            asyncio.run(check(running, acknowledged, kill + 1))
            enough = len(acknowledged) + rng.randint(1, 400)
            asyncio.run(load(running, f"{seed}/{kill}", enough, acknowledged))
    with platform(tmp_path, *options) as running:
        asyncio.run(check(running, acknowledged, KILLS_PER_SEED + 1))


def deploy(url: str) -> None:
    answer = httpx.post(
        f"{url}/apps",
        json={"sources": {"kept.py": APP}},
        headers=token_headers(url),
        timeout=120,
    )
    assert answer.status_code == httpx.codes.OK, answer.text


@pytest.mark.repeated("tests/cluster/faults/test_kill_embedded.py")
@pytest.mark.cluster
@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "options", [pytest.param((), id="embedded"), repeated(("--processes",), "processes")]
)
def test_forty_kills_of_all_processes_under_32_writers_lose_nothing_acknowledged(
    tmp_path: Path, options: tuple[str, ...], kills_wanted: int | None
) -> None:
    rng = random.Random(40)
    acknowledged: dict[int, bytes] = {}
    for kill in range(kills_wanted or 3):
        with platform(tmp_path, *options) as running:
            enough = len(acknowledged) + rng.randint(1, 800)
            asyncio.run(load(running, str(kill), enough, acknowledged, callers=32))
    with platform(tmp_path, *options) as running:
        found = asyncio.run(everything_in(running.url))
    assert not {s: data for s, data in acknowledged.items() if found.get(s) != data}
    assert len(set(found.values())) == len(found), "no record is there twice"
    last: dict[bytes, int] = {}
    for data in found.values():
        caller, _, number = data.rpartition(b"-")
        assert int(number) == last.get(caller, -1) + 1, "a caller's records keep their order"
        last[caller] = int(number)


async def everything_in(url: str) -> dict[int, bytes]:
    """Return the records of the load by seqnum, ascending."""
    found: dict[int, bytes] = {}
    async with indilog.connect(url) as client:
        bound = 0
        while page := await client.log("load").read_range(bound=bound, limit=1000):
            found |= {record.seqnum: record.data for record in page}
            bound = page[-1].seqnum + 1
    return found
