"""Metric files: any process can read the metrics of a running process, and none of a dead one."""

from __future__ import annotations

import os
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
    (tmp_path / "storage-0.status").write_bytes(b"{}")
    (tmp_path / "storage-1.status").write_bytes(b'{"storage-1": 7')
    assert StatusFiles(tmp_path).read([A, B]).silent == [B]
    os.utime(tmp_path / "storage-0.status", (1, 1))
    assert StatusFiles(tmp_path).read([A, B]).silent == [A, B]
