"""Power loss on a real file system (A3). During appends, soon after a kill and a restart, ext4 is
shut down, which drops all unsynced bytes. Every acknowledged record is there afterwards.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack

import pytest

from tests.cluster.append_load import CALLERS
from tests.cluster.faults.test_kill_embedded import (
    acknowledged_until_killed,
    check_all_there,
    everything_in,
    load_command,
)

ROOT = Path(__file__).resolve().parents[3]
IMAGE_BYTES = 256 * 1024 * 1024
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


@contextmanager
def mounted(image: Path, directory: Path) -> Iterator[Path]:
    """Mount an ext4 image; skips the test where that is not permitted."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-o", "loop", str(image), str(directory)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"an image cannot be mounted here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def shut_down(directory: Path) -> None:
    """Shut a file system down as a power loss does: unsynced bytes are lost."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def acknowledged_until_cut(directory: Path, name: str, count: int, disk: Path) -> dict[int, bytes]:
    """Run the load until `count` lines came, cut the power, and return all that it printed."""
    with subprocess.Popen(
        load_command(directory, name),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        shut_down(disk)
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
    whole = [line for line in lines + rest if line.endswith(b"\n")]
    assert len(whole) >= count, "the load ended by itself"
    return {int(seqnum): data for seqnum, data in (line.split() for line in whole)}


@pytest.mark.cluster
@pytest.mark.heavy
def test_every_acknowledged_record_survives_a_power_cut(
    tmp_path: Path, seeds_wanted: int | None
) -> None:
    for seed in range(seeds_wanted or 1):
        cut_repeatedly(tmp_path, seed)


def cut_repeatedly(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    image = tmp_path / f"image-{seed}"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    acknowledged: dict[int, bytes] = {}
    for cut in range(3):
        with mounted(image, tmp_path / "disk") as disk:
            data = disk / "data"
            # After the kill the restart reads bytes from the page cache that are not on disk.
            runs = [acknowledged_until_killed(data, f"{seed}/{cut}/killed", rng.randint(1, 2000))]
            count = rng.choice((1, CALLERS, 800))
            runs.append(acknowledged_until_cut(data, f"{seed}/{cut}/cut", count, disk))
        for reported in runs:
            assert not reported.keys() & acknowledged.keys(), "each seqnum is assigned once"
            acknowledged |= reported
    with mounted(image, tmp_path / "disk") as disk:
        check_all_there(asyncio.run(everything_in(disk / "data")), acknowledged)
