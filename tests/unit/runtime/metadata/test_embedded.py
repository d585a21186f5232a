"""The metadata file: replaced atomically, used by one process at a time, checked when it is
read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from indilog.base.errors import DataDirectoryError, DiskFullError, OverloadedError
from indilog.config import NodeConfig, node_config
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.store import (
    Conflict,
    SessionExpiredError,
    Versioned,
    Write,
    Written,
)

CONFIG = NodeConfig()


def opened(directory: Path) -> EmbeddedMetadataStore:
    return EmbeddedMetadataStore(directory / "metadata", CONFIG)


async def set_once(directory: Path) -> None:
    with opened(directory) as store:
        await store.compare_and_set("view", b"one", expected_version=0)


def test_a_second_process_on_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(DataDirectoryError, match="in use by another process"):
        opened(tmp_path)
    opened(tmp_path).close()


@pytest.mark.parametrize("offset", [0, 4, 6, 12, -1])
def test_a_flipped_bit_in_the_metadata_file_is_repaired(tmp_path: Path, offset: int) -> None:
    asyncio.run(set_once(tmp_path))
    file = tmp_path / "metadata"
    damaged = bytearray(file.read_bytes())
    damaged[offset] ^= 1
    file.write_bytes(damaged)
    with opened(tmp_path) as store:
        assert asyncio.run(store.get("view")) == Versioned(b"one", 1)


def test_damage_of_two_bits_is_detected_and_the_file_left_alone(tmp_path: Path) -> None:
    asyncio.run(set_once(tmp_path))
    file = tmp_path / "metadata"
    damaged = bytearray(file.read_bytes())
    damaged[12] ^= 1
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataDirectoryError, match="damaged"):
        opened(tmp_path)
    assert file.read_bytes() == bytes(damaged)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"ILMD")
    with pytest.raises(DataDirectoryError, match="no metadata file"):
        opened(tmp_path)


def test_a_newer_format_is_refused_with_its_number(tmp_path: Path) -> None:
    asyncio.run(set_once(tmp_path))
    file = tmp_path / "metadata"
    data = bytearray(file.read_bytes())
    data[4] = 9
    file.write_bytes(data)
    with pytest.raises(DataDirectoryError, match="format 9"):
        opened(tmp_path)


def test_a_file_of_version_2_is_read_and_continues_with_greater_versions(tmp_path: Path) -> None:
    """Version 2 had keys with counts of their own, and sequences."""
    body = msgspec.msgpack.encode([{"view": [b"one", 7, "w"], "run": [b"r", 3, ""]}, {"epoch": 4}])
    crc = crc32c(body, crc32c(b"ILMD\x02"))
    (tmp_path / "metadata").write_bytes(struct.pack("<4sBI", b"ILMD", 2, crc) + body)

    async def story() -> None:
        with opened(tmp_path) as store:
            assert await store.get("view") == Versioned(b"one", 7)
            assert await store.next_sequence("epoch") == 5
            assert await store.compare_and_set("run", b"s", expected_version=3) == Written(8)
            assert await store.compare_and_set("view", b"two", expected_version=7) == Written(9)

    asyncio.run(story())
    with opened(tmp_path) as store:
        assert asyncio.run(store.get("run")) == Versioned(b"s", 8)


def test_a_file_of_version_3_is_read_and_written_as_version_4(tmp_path: Path) -> None:
    """Version 3 had no superseded writes."""
    body = msgspec.msgpack.encode([{"view": [b"one", 7, "w", ""]}, {"epoch": 4}, 9, {"s": 5.0}])
    crc = crc32c(body, crc32c(b"ILMD\x03"))
    file = tmp_path / "metadata"
    file.write_bytes(struct.pack("<4sBI", b"ILMD", 3, crc) + body)

    async def story() -> None:
        with opened(tmp_path) as store:
            assert await store.get("view") == Versioned(b"one", 7)
            assert await store.compare_and_set("view", b"two", expected_version=7) == Written(10)
            assert await store.write(Write("view", b"one", 6), writer="w") == Written(7)

    asyncio.run(story())
    assert file.read_bytes()[4] == 4


def test_a_store_that_is_opened_again_gives_each_session_its_whole_time_again(
    tmp_path: Path,
) -> None:
    now = 100.0

    def clock() -> float:
        return now

    async def story() -> None:
        nonlocal now
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG, clock) as store:
            await store.open_session("s", 10.0)
            outcome = await store.write(Write("leader", b"", 0, is_ephemeral=True), session="s")
            assert outcome == Written(1)
            now += 9.9
            assert await store.heartbeat("s")
            now += 9.9
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG, clock) as store:
            now += 9.9
            assert await store.get("leader") == Versioned(b"", 1)
            assert await store.heartbeat("s")
            now += 10.0
            assert await store.get("leader") is None
            assert not await store.heartbeat("s")
            with pytest.raises(SessionExpiredError, match="has expired"):
                await store.write(Write("x", b"", 0), session="s")
            with pytest.raises(SessionExpiredError, match="has expired"):
                await store.remove("x", 0, session="s")

    asyncio.run(story())


def test_each_session_ends_in_time_also_one_that_is_shorter_than_those_before(
    tmp_path: Path,
) -> None:
    """Only the store's own timer ends the sessions."""
    now = 100.0

    def clock() -> float:
        return now

    async def story() -> None:
        nonlocal now
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG, clock) as store:
            await store.open_session("long", 1000.0)
            await store.open_session("short", 0.05)
            await store.write(Write("leader", b"", 0, is_ephemeral=True), session="short")
            watch = asyncio.create_task(store.watch("leader", after=1))
            await asyncio.sleep(0)
            now += 0.05
            async with asyncio.timeout(60.0):
                assert await watch is None
            assert await store.heartbeat("long")

    asyncio.run(story())


def test_opening_that_failed_leaves_the_lock_free(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"rubbish")
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match="no metadata file"):
            opened(tmp_path)


def test_a_write_that_was_not_renamed_never_happened(tmp_path: Path) -> None:
    asyncio.run(set_once(tmp_path))
    (tmp_path / "metadata.new").write_bytes(b"half a wri")
    with opened(tmp_path) as store:
        assert asyncio.run(store.get("view")) == Versioned(b"one", 1)


def test_a_write_is_acknowledged_after_the_file_and_its_directory_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    asyncio.run(set_once(tmp_path))
    assert steps == ["metadata.new", tmp_path.name]


def test_after_a_failed_sync_every_later_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with opened(tmp_path) as store:
            await store.compare_and_set("view", b"one", expected_version=0)
            with monkeypatch.context() as broken:
                broken.setattr(os, "fsync", _fail)
                with pytest.raises(DataDirectoryError, match="disk"):
                    await store.compare_and_set("view", b"two", expected_version=1)
            with pytest.raises(DataDirectoryError, match="restart the process"):
                await store.compare_and_set("view", b"two", expected_version=1)
            with pytest.raises(DataDirectoryError, match="restart the process"):
                await store.next_sequence("epoch")

    asyncio.run(story())


def _fail(descriptor: int) -> None:
    raise OSError(errno.EIO, "disk")


def test_on_a_full_disk_a_write_uses_the_reserved_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A35: a process can start on a full disk, which needs a new epoch."""
    reserve = tmp_path / "metadata.reserve"
    whole = os.fsync

    def full(descriptor: int) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "full")
        whole(descriptor)

    def quite_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def story() -> None:
        with opened(tmp_path) as store:
            await store.compare_and_set("view", b"one", expected_version=0)
            assert reserve.exists()
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", full)
                assert await store.next_sequence("epoch") == 1
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", quite_full)
                with pytest.raises(DiskFullError, match="make room"):
                    await store.next_sequence("epoch")
            assert not (tmp_path / "metadata.new").exists()
            assert await store.next_sequence("epoch") == 2
            assert reserve.exists()

    asyncio.run(story())


def test_a_resent_conditional_write_succeeds_again(tmp_path: Path) -> None:
    async def story() -> None:
        with opened(tmp_path) as store:
            for _ in range(2):
                outcome = await store.write(Write("view", b"one", 0), writer="w1")
                assert outcome == Written(1)
        with opened(tmp_path) as store:
            repeated = store.write(Write("view", b"one", 0), writer="w1")
            assert await repeated == Written(1)

    asyncio.run(story())


def test_a_resent_write_is_not_applied_again_after_its_key_was_deleted(tmp_path: Path) -> None:
    """Also if another write replaced the value before, and after a restart of the store."""

    async def story() -> None:
        with opened(tmp_path) as store:
            first = await store.write(Write("leader", b"one", 0), writer="w1")
            assert first == Written(1)
            second = await store.write(Write("leader", b"two", 1), writer="w2")
            await store.delete("leader", expected_version=second.version)
            assert await store.write(Write("leader", b"one", 0), writer="w1") == Written(1)
            assert await store.get("leader") is None
        with opened(tmp_path) as store:
            assert await store.write(Write("leader", b"one", 0), writer="w1") == Written(1)
            assert await store.write(Write("leader", b"two", 1), writer="w2") == Written(2)
            assert await store.get("leader") is None

    asyncio.run(story())


def test_a_resent_write_is_not_applied_again_after_its_session_has_ended(tmp_path: Path) -> None:
    async def story() -> None:
        with opened(tmp_path) as store:
            await store.open_session("s", 60.0)
            write = Write("leader", b"", 0, is_ephemeral=True)
            written = await store.write(write, session="s", writer="w1")
            await store.close_session("s")
            assert await store.write(Write("leader", b"", 0), writer="w1") == written
            assert await store.get("leader") is None

    asyncio.run(story())


def test_only_the_newest_superseded_writes_are_remembered(tmp_path: Path) -> None:
    async def story() -> None:
        with opened(tmp_path) as store:
            for i in range(66):  # the first 65 of them are superseded
                await store.write(Write("view", b"", i), writer=f"w{i}")
            assert await store.write(Write("view", b"", 1), writer="w1") == Written(2)
            assert await store.write(Write("view", b"", 0), writer="w0") == Conflict(66)

    asyncio.run(story())


def test_a_closed_store_refuses_writes_because_another_process_may_own_the_file(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    store.close()
    with opened(tmp_path), pytest.raises(DataDirectoryError, match="takes no more writes"):
        asyncio.run(store.next_sequence("epoch"))


def test_watches_are_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        config = node_config(metadata_watchers_max=2)
        with EmbeddedMetadataStore(tmp_path / "metadata", config) as store:
            watches = [asyncio.create_task(store.watch("view", after=0)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="2 watches"):
                await store.watch("view", after=0)
            await store.compare_and_set("view", b"one", expected_version=0)
            assert await asyncio.gather(*watches) == [Versioned(b"one", 1)] * 2

    asyncio.run(story())
