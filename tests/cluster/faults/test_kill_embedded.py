"""A3 for the embedded platform: kill -9 during appends loses nothing that was acknowledged."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

import indilog.client
from tests.cluster.append_load import CALLERS, CONFIG
from tests.support.repeated import repeated

ROOT = Path(__file__).resolve().parents[3]
KILLS_PER_SEED = 4


def load_command(directory: Path, name: str) -> list[str]:
    """Return the command of the load with 32 callers."""
    load = [sys.executable, "-m", "tests.cluster.append_load"]
    return [*load, str(directory), name, str(CALLERS)]


def acknowledged_until_killed(directory: Path, name: str, count: int) -> dict[int, bytes]:
    """Run the load until `count` lines came, kill it at work, and return all that it printed."""
    with subprocess.Popen(
        load_command(directory, name), cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
    whole = [line for line in lines + rest if line.endswith(b"\n")]
    assert len(whole) >= count, "the load ended by itself"
    return {int(seqnum): data for seqnum, data in (line.split() for line in whole)}


async def everything_in(directory: Path) -> list[tuple[int, bytes]]:
    async with indilog.client.open(directory, CONFIG) as client:
        log = client.log("load")
        found: list[tuple[int, bytes]] = []
        while page := await log.read_range(bound=len(found), limit=10_000):
            found += [(record.seqnum, record.data.rstrip()) for record in page]
        assert await log.tail() == len(found)
        for caller in range(CALLERS):
            last = await log.read_prev(f"caller:{caller}")
            mine = [s for s, data in found if data.split(b"-")[1] == b"%d" % caller]
            assert (last.seqnum if last else None) == (mine[-1] if mine else None)
        return found


def check_all_there(found: list[tuple[int, bytes]], acknowledged: dict[int, bytes]) -> None:
    """Check that acknowledged records are there once, each caller's in its order."""
    assert [seqnum for seqnum, _ in found] == list(range(len(found))), "seqnums are dense"
    assert len({data for _, data in found}) == len(found), "no record is there twice"
    at = dict(found)
    assert not {s: data for s, data in acknowledged.items() if at.get(s) != data}
    last: dict[bytes, int] = {}
    for _, data in found:
        caller, _, number = data.rpartition(b"-")
        assert int(number) == last.get(caller, -1) + 1, "a caller's records keep their order"
        last[caller] = int(number)


async def killed_repeatedly(directory: Path, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    acknowledged: dict[int, bytes] = {}
    for kill in range(kills):
        reported = acknowledged_until_killed(directory, f"{seed}/{kill}", rng.randint(1, 1500))
        assert not reported.keys() & acknowledged.keys(), "each seqnum is assigned once"
        acknowledged |= reported
    check_all_there(await everything_in(directory), acknowledged)


@pytest.mark.repeated("tests/cluster/faults/test_kill_embedded.py")
@pytest.mark.cluster
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [0, repeated(1)])
async def test_every_acknowledged_record_is_at_its_seqnum_after_kill_9(
    tmp_path: Path, seed: int
) -> None:
    await killed_repeatedly(tmp_path, seed, KILLS_PER_SEED)


@pytest.mark.cluster
@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.asyncio
async def test_forty_kills_under_32_writers_lose_nothing_acknowledged(
    tmp_path: Path, kills_wanted: int | None
) -> None:
    await killed_repeatedly(tmp_path, 40, kills_wanted or 5)
