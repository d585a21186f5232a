"""Metric files: any process can read the metrics of a running process, and none of a dead one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from indilog.base.ids import NodeId
from indilog.runtime.cluster.status_files import StatusFiles, publish_status

A, B = NodeId("storage-0"), NodeId("storage-1")


@pytest.mark.asyncio
async def test_metrics_of_another_process_are_readable_until_it_ends(tmp_path: Path) -> None:
    status: dict[str, dict[str, int]] = {A: {"read_only": 1, "missing_records": 7}}
    async with publish_status(StatusFiles(tmp_path), [A], lambda: status):
        assert StatusFiles(tmp_path).read([A, B]) == (status, [B])
    assert StatusFiles(tmp_path).read([A]) == ({}, [A])


@pytest.mark.asyncio
async def test_each_node_of_a_process_has_a_file(tmp_path: Path) -> None:
    status: dict[str, dict[str, int]] = {A: {"read_only": 1}}
    async with publish_status(StatusFiles(tmp_path), [A, B], lambda: status):
        assert StatusFiles(tmp_path).read([A, B]) == (status, [])
        assert StatusFiles(tmp_path).read([B]) == ({}, [])
    assert StatusFiles(tmp_path).read([A, B]) == ({}, [A, B])


@pytest.mark.asyncio
async def test_outdated_or_damaged_metric_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "storage-0.status").write_bytes(b'{"process": %d, "status": {}}' % os.getpid())
    (tmp_path / "storage-1.status").write_bytes(b'{"process": 7')
    assert StatusFiles(tmp_path).read([A, B]).silent == [B]
    os.utime(tmp_path / "storage-0.status", (1, 1))
    assert StatusFiles(tmp_path).read([A, B]).silent == [A, B]


_PUBLISHES = """
import asyncio, pathlib, sys
from indilog.runtime.cluster.status_files import StatusFiles
asyncio.run(StatusFiles(pathlib.Path(sys.argv[1])).write({"storage-0": {"read_only": 1}}))
print(flush=True)
sys.stdin.read()
"""


def test_the_status_of_a_killed_process_is_ignored_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PUBLISHES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert StatusFiles(tmp_path).read([A]).silent == []
        process.kill()
        process.wait()
        assert StatusFiles(tmp_path).read([A]) == ({}, [A])
