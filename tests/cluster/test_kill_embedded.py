"""A3 for the embedded platform: kill -9 amid appends loses nothing that was acknowledged."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

import indilog.client
from indilog.config import Config, NodeConfig
from tests.cluster.append_load import CALLERS, SEGMENT_BYTES

ROOT = Path(__file__).resolve().parents[2]
KILLS_PER_SEED = 4


def acknowledged_until_killed(directory: Path, name: str, count: int) -> dict[int, bytes]:
    """Run the load until `count` lines came, kill it amid its work, and return all that it told."""
    command = [sys.executable, "-m", "tests.cluster.append_load", str(directory), name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
    whole = [line for line in lines + rest if line.endswith(b"\n")]
    assert len(whole) >= count, "the load ended by itself"
    return {int(seqnum): data for seqnum, data in (line.split() for line in whole)}


async def everything_in(directory: Path) -> list[tuple[int, bytes]]:
    config = Config(node=NodeConfig(segment_bytes=SEGMENT_BYTES))
    async with indilog.client.open(directory, config) as client:
        log = client.log("load")
        found: list[tuple[int, bytes]] = []
        while page := await log.read_range(bound=len(found), limit=10_000):
            found += [(record.seqnum, record.data) for record in page]
        assert await log.tail() == len(found)
        for caller in range(CALLERS):
            last = await log.read_prev(f"caller:{caller}")
            mine = [s for s, data in found if data.split(b"-")[1] == b"%d" % caller]
            assert (last.seqnum if last else None) == (mine[-1] if mine else None)
        return found


@pytest.mark.cluster
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(5))
async def test_a3_every_acknowledged_record_is_at_its_seqnum_after_kill_9(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    acknowledged: dict[int, bytes] = {}
    for kill in range(KILLS_PER_SEED):
        told = acknowledged_until_killed(tmp_path, f"{seed}/{kill}", rng.randint(1, 1500))
        assert not told.keys() & acknowledged.keys(), "a seqnum is given once"
        acknowledged |= told
    found = await everything_in(tmp_path)
    assert [seqnum for seqnum, _ in found] == list(range(len(found))), "seqnums are dense"
    assert len({data for _, data in found}) == len(found), "nothing is there twice"
    at = dict(found)
    lost = {s: data for s, data in acknowledged.items() if at.get(s) != data}
    assert not lost
