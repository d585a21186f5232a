"""The end of an embedded platform: every waiting caller is answered, later ones are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import indilog
from indilog.config import MIB, Config, node_config
from indilog.runtime.cluster.assembly import embedded


@pytest.mark.asyncio
async def test_calls_that_wait_at_the_close_and_later_calls_get_an_error(
    tmp_path: Path,
) -> None:
    config = Config(node=node_config(data_dir=tmp_path, segment_bytes=8 * MIB))
    async with embedded(config) as platform:
        log = platform.logs.log("orders")
        await log.append(b"x")
        waiting = asyncio.create_task(log.read_next("never", wait=60))
        await asyncio.sleep(0)
        await log.read_next("other")
    with pytest.raises(indilog.NotReadyError, match="closed"):
        await asyncio.wait_for(waiting, 60)
    for late in (log.append(b"y"), log.read_range(), log.tail()):
        with pytest.raises(indilog.NotReadyError, match="stopped"):
            await asyncio.wait_for(late, 60)


@pytest.mark.asyncio
async def test_a_failed_sync_ends_the_platform_and_every_waiting_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[BaseException] = []
    config = Config(node=node_config(data_dir=tmp_path, segment_bytes=8 * MIB))
    async with embedded(config, faults.append) as platform:
        log = platform.logs.log("orders")
        await log.append(b"x")
        waiting = asyncio.create_task(log.read_next("never", wait=60))
        await log.read_next("other")

        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.fdatasync", fail)
        with pytest.raises(indilog.AppendOutcomeUnknownError, match="Input/output"):
            await asyncio.wait_for(log.append(b"y"), 60)
        with pytest.raises(indilog.NotReadyError):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(indilog.NotReadyError, match="stopped"):
            await asyncio.wait_for(log.append(b"z"), 60)
        monkeypatch.undo()
    assert [str(fault) for fault in faults] == ["[Errno 5] Input/output error"]


@pytest.mark.asyncio
async def test_a_directory_that_cannot_be_used_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(indilog.DataDirectoryError, match="file cannot be used: Not a directory"):
        async with indilog.open(tmp_path / "file"):
            raise AssertionError("it opened")
