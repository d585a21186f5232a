"""kill -9 while records move to cold storage: every acknowledged record is there once, and objects
that no note names are deleted.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, read_records
from tests.support.cold_storage import configured, everything, figures, objects, wait_for

ROOT = Path(__file__).resolve().parents[3]
KILLS = 4
pytestmark = pytest.mark.cluster


def acknowledged_until_killed(directory: Path, name: str, count: int) -> dict[int, bytes]:
    """Run the load until `count` lines came, kill it at work, and return all that it printed."""
    command = [sys.executable, "-m", "tests.cluster.faults.cold_load", str(directory), name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines: list[bytes] = []
        while len(lines) < count and (line := process.stdout.readline()):
            lines.append(line)
        process.kill()
        lines += process.stdout.read().splitlines(keepends=True)
    pairs = (line.split() for line in lines if line.endswith(b"\n"))
    found = {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdigit()}
    assert len(found) >= count // 2, "the load ended by itself"
    return found


def test_a_killed_move_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    chance = random.Random(5)
    acknowledged: dict[int, bytes] = {}
    for kill in range(KILLS):
        count = chance.randint(300, 1200)
        acknowledged.update(acknowledged_until_killed(tmp_path, f"run{kill}", count))

    async def story() -> list[tuple[int, bytes]]:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("load")
            found = [(s, data.rstrip(b".")) for s, data in await everything(log)]
            await wait_for(lambda: figures(platform, "cold_objects") > 3)
            await wait_for(lambda: figures(platform, "cold_objects") == len(objects(tmp_path)))
            return found

    found = uvloop.run(story())
    assert [seqnum for seqnum, _ in found] == list(range(len(found)))
    at = dict(found)
    assert not {s: data for s, data in acknowledged.items() if at.get(s) != data}
    image = LogImage.read(tmp_path / "data")
    batches = read_records(image, columns=["data"], wanted=Filter("load"))
    read = [bytes(one or b"").rstrip(b".") for b in batches for one in b.column(0).to_pylist()]
    assert read == [data for _, data in found]
