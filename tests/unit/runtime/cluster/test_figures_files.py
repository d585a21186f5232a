"""Published figures of processes reach the status, and do not outlive their processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from indilog.base.ids import NodeId
from indilog.runtime.cluster.figures_files import figures_published, figures_read

A, B = NodeId("storage-0"), NodeId("storage-1")


@pytest.mark.asyncio
async def test_figures_of_another_process_are_shown_until_it_ends(tmp_path: Path) -> None:
    figures: dict[str, dict[str, int]] = {A: {"read_only": 1, "missing_records": 7}}
    async with figures_published(tmp_path, A, lambda: figures):
        assert figures_read(tmp_path, [A, B]) == (figures, [B])
    assert figures_read(tmp_path, [A]) == ({}, [A])


@pytest.mark.asyncio
async def test_old_or_damaged_figures_count_as_silent(tmp_path: Path) -> None:
    (tmp_path / "storage-0.figures").write_bytes(b"{}")
    (tmp_path / "storage-1.figures").write_bytes(b'{"storage-1": 7')
    assert figures_read(tmp_path, [A, B]).silent == [B]
    os.utime(tmp_path / "storage-0.figures", (1, 1))
    assert figures_read(tmp_path, [A, B]).silent == [A, B]
