"""A platform whose index nodes write snapshots: restarts from them, and bounded memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from indilog.base.errors import TrimmedError
from indilog.base.log import Log
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.index_snapshot import snapshot_files
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_index.index_node import IndexNode

TAGS = 50
ROUND = 2_000
WAVE = 40


def config_in(directory: Path) -> Config:
    """No local index, so that every read goes to the index tier, which has little memory."""
    node = node_config(
        data_dir=directory, suffix_cuts_max=0, popularity_entries_max=0, tag_cache_seqnums_max=0,
        tag_cache_seqnums_per_tag_max=0, record_cache_bytes_max=0,
        index_memory_bytes_max=40_000, index_snapshot_entries_min=1_000,
    )  # fmt: skip
    return Config(cluster=ClusterConfig(index_shards=2), node=node)


def index_nodes(platform: Platform) -> list[IndexNode]:
    return [role for role in platform.shell.roles.values() if isinstance(role, IndexNode)]


async def append_round(log: Log, number: int) -> None:
    """Append in waves, so that both index shards get a share."""
    for first in range(number * ROUND, (number + 1) * ROUND, WAVE):
        wave = range(first, first + WAVE)
        await asyncio.gather(
            *(log.append(b"%d" % n, tags=[n % TAGS + 1, f"only-{n}"]) for n in wave)
        )


async def check(log: Log, rounds: int) -> None:
    end = rounds * ROUND
    for tag in (0, 17, TAGS - 1):
        found = []
        bound = 0
        while page := await log.read_range(tag=tag + 1, bound=bound, limit=70):
            found += [int(record.data) for record in page]
            bound = page[-1].seqnum + 1
        assert sorted(found) == list(range(tag, end, TAGS))
    for n in range(0, end, end // 40):
        record = await log.read_prev(f"only-{n}")
        assert record is not None
        assert record.data == b"%d" % n
        assert await log.read_next(f"only-{n}", record.seqnum + 1) is None
    assert await log.read_next("never", 0) is None


async def wait_for_loaded_snapshots(platform: Platform) -> None:
    """Wait until all index nodes have loaded the snapshots of an earlier start."""
    loading = index_nodes(platform)
    async with asyncio.timeout(60):
        while loading:
            for node in [node for node in loading if node.status()["snapshot_rows"]]:
                # Now: it may write one of its own while another node still loads.
                assert not node.status()["snapshots_written"]
                loading.remove(node)
            await platform.logs.log("orders").tail()


async def wait_for_written_snapshots(platform: Platform) -> None:
    """Wait until every index node has written a snapshot."""
    async with asyncio.timeout(60):
        while not all(node.status()["snapshots_written"] for node in index_nodes(platform)):
            await platform.logs.log("orders").tail()


def test_an_index_that_does_not_fit_in_memory_is_complete_before_and_after_restarts(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        for starts in (1, 2, 3):
            async with embedded(config_in(tmp_path)) as platform:
                log = platform.logs.log("orders")
                if starts > 1:
                    await wait_for_loaded_snapshots(platform)
                await append_round(log, starts - 1)
                await wait_for_written_snapshots(platform)
                await check(log, starts)
                for node in index_nodes(platform):
                    status = node.status()
                    assert status["spilled_rows"] > 0
                    assert status["snapshots_failed"] == 0

    uvloop.run(story())


@pytest.mark.parametrize("lost", ["newest damaged", "all gone"])
def test_a_platform_that_lost_snapshots_rebuilds_its_index_from_storage(
    tmp_path: Path, lost: str
) -> None:
    async def story() -> None:
        async with embedded(config_in(tmp_path)) as platform:
            await append_round(platform.logs.log("orders"), 0)
            await wait_for_written_snapshots(platform)
        for node in ("index-0-0", "index-1-0"):
            files = snapshot_files(tmp_path / "snapshots" / node)
            assert files
            for _, file in files[:1] if lost == "newest damaged" else files:
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content) if lost == "newest damaged" else file.unlink()
        async with embedded(config_in(tmp_path)) as platform:
            await check(platform.logs.log("orders"), 1)

    uvloop.run(story())


def test_trimmed_records_stay_trimmed_although_snapshots_contain_them(tmp_path: Path) -> None:
    """A22, with most of the index on disk: whole and per tag, before and after a restart."""

    async def check_trimmed(log: Log, until: int, of_tag: int) -> None:
        for n in range(0, ROUND, ROUND // 20):
            if n < until:
                for read in (log.read_next, log.read_prev):
                    with pytest.raises(TrimmedError):
                        await read(f"only-{n}")
            else:
                record = await log.read_next(f"only-{n}", until)
                assert record is not None
                assert record.data == b"%d" % n
        with pytest.raises(TrimmedError) as raised:
            await log.read_next(3, until)
        assert raised.value.first_seqnum == of_tag
        found = await log.read_range(tag=3, bound=of_tag, limit=1000)
        assert [record.seqnum for record in found] == [
            record.seqnum
            for record in await log.read_range(bound=of_tag, limit=ROUND)
            if int(record.data) % TAGS == 2
        ]
        assert len(found) == sum(n % TAGS == 2 for n in range(of_tag, ROUND))

    async def story() -> None:
        until, of_tag = ROUND // 2, ROUND // 2 + 300
        async with embedded(config_in(tmp_path)) as platform:
            log = platform.logs.log("orders")
            await append_round(log, 0)
            await wait_for_written_snapshots(platform)
            assert [r.seqnum for r in await log.read_range(limit=ROUND)] == list(range(ROUND))
            await log.trim(until)
            await log.trim(of_tag, tag=3)
            await check_trimmed(log, until, of_tag)
        async with embedded(config_in(tmp_path)) as platform:
            await wait_for_loaded_snapshots(platform)
            log = platform.logs.log("orders")
            await check_trimmed(log, until, of_tag)
            before = sum(node.status()["snapshot_rows"] for node in index_nodes(platform))
            await asyncio.gather(*(log.append(b"x") for _ in range(WAVE)))
            await log.trim(ROUND)
            for n in range(WAVE):
                await log.append(b"%d" % n, tags=["after"])
            await wait_for_written_snapshots(platform)
            after = sum(node.status()["snapshot_rows"] for node in index_nodes(platform))
            assert after < before / 2, "rows of trimmed records are removed from the disk"
            assert len(await log.read_range(tag="after", bound=ROUND, limit=1000)) == WAVE

    uvloop.run(story())
