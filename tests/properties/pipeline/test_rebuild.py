"""A rebuilt index has the rows of a live one, and lookups through it find the same records."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import UserTag
from indilog.base.log import Log
from indilog.kernel.index_snapshot import Rows, opened_snapshot, read_rows, snapshot_files
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_index.index_node import IndexNode
from indilog_index.rebuild.sorted_runs import SortedRuns
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.rebuild.local import LocalEngine
from indilog_pipeline.rebuild.plan import Engine
from indilog_pipeline.rebuild.run import Sharding, rebuild_index
from indilog_pipeline.rebuild.verify import verify_index
from tests.properties.pipeline.stories import LOGS, TAGS, Story


def listed(rows: Rows) -> list[tuple[int, int, int]]:
    return list(zip(rows.tags.tolist(), rows.seqnums.tolist(), rows.shards.tolist(), strict=True))


def rows_in(directory: Path) -> dict[str, set[tuple[int, int, int]]]:
    """Return the rows of the newest snapshot of each index node."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for folder in sorted((directory / "snapshots").iterdir()):
        parquet, snapshot = opened_snapshot(snapshot_files(folder)[0][1])
        pieces = [read_rows(parquet, group) for group in range(len(snapshot.groups.lowest))]
        assert [len(rows.tags) for rows in pieces[:-1]] == [16_384] * (len(pieces) - 1)
        rows = [row for piece in pieces for row in listed(piece)]
        assert rows == sorted(set(rows))
        lost = {seqnum for part in snapshot.info.lost for seqnum in range(*part)}
        assert lost == {seqnum for _, seqnum, _ in rows if seqnum in lost}
        found[folder.name] = set(rows)
    return found


def live_rows(platform: Platform) -> dict[str, set[tuple[int, int, int]]]:
    """Return the rows that index nodes without snapshots have in memory."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for node, role in platform.shell.roles.items():
        if isinstance(role, IndexNode):
            found[node] = set(listed(role._store.unwritten_rows()()))
    return found


async def lookups(platform: Platform) -> list[object]:
    """Return what reads of each log and tag find, with what they cannot tell."""
    found: list[object] = []
    for name in LOGS:
        for tag in (None, *TAGS):
            bound = 0
            while (outcome := await _next(platform.logs.log(name), tag, bound)) is not None:
                bound, *said = outcome
                found.append((name, tag, *said))
    return found


async def _next(log: Log, tag: UserTag | None, bound: int) -> tuple[int, object] | None:
    """Return where to read on, and what was found there; None: nothing more."""
    try:
        record = await log.read_next(tag, bound=bound)
    except TrimmedError as error:
        return error.first_seqnum, "trimmed"
    except DataLossError as error:
        return error.next_seqnum or 0, ("lost", error.seqnum)
    return None if record is None else (record.seqnum + 1, record.seqnum)


@pytest.mark.timeout(300)
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 1 << 32),
    replicas=st.sampled_from((1, 2)),
    killed=st.booleans(),
    damaged=st.sampled_from((0, 0, 2)),
    sharding=st.sampled_from((None, Sharding(3), Sharding(1, anew=True), Sharding(4, anew=True))),
    memory_bytes=st.sampled_from((100, 10_000, 1 << 24)),
)
def test_a_rebuilt_index_finds_what_a_live_one_finds(
    seed: int,
    replicas: int,
    killed: bool,
    damaged: int,
    sharding: Sharding | None,
    memory_bytes: int,
) -> None:
    """All snapshots are deleted; trims, damage, several shards, changed index shards."""
    engine = LocalEngine(memory_bytes_max=memory_bytes)
    asyncio.run(check_rebuilt(seed, replicas, killed, damaged, engine, sharding))


async def check_rebuilt(
    seed: int,
    replicas: int,
    killed: bool,
    damaged: int,
    engine: Engine,
    sharding: Sharding | None,
) -> None:
    """Compare what an engine rebuilds with a live index, for one random run of a platform."""
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder, "data"), random.Random(seed), replicas=replicas)
        await story.run(40, killed=False)
        story.change_index_shards()
        await story.run(40, killed=killed)
        if replicas == 1:
            story.damage(damaged)
        shutil.rmtree(story.directory / "snapshots", ignore_errors=True)
        live = Path(folder, "live")
        shutil.copytree(story.directory, live)
        # A checkpoint may have tags that were damaged since: the live index begins without it.
        with patch.object(IndexNode, "restore"):
            try:
                async with embedded(story.configured_for(live, snapshots=False)) as platform:
                    wanted, wanted_rows = await lookups(platform), live_rows(platform)
            except DataLossError:
                assert damaged, "only damage of most copies of the metalog keeps it from starting"
                return
        done = rebuild_index(story.directory, engine, sharding=sharding)
        assert verify_index(story.directory).difference is None
        image = LogImage.read(story.directory)
        assert {one.position for one in done} == {image.position}
        if sharding is not None:
            active = image.view.eras[-1].shards
            assert active == tuple(range(sharding.index_shards))
            assert len(image.view.index_shards) == len(active) or not sharding.anew
            cluster = dataclasses.replace(story.config.cluster, index_shards=len(active))
            story.config = dataclasses.replace(story.config, cluster=cluster)
        rows = rows_in(story.directory)
        if sharding is not None and sharding.anew:
            rows, wanted_rows = ({"all": set().union(*r.values())} for r in (rows, wanted_rows))
        compare_rows(rows, wanted_rows, image)
        async with embedded(story.config) as platform:
            assert platform.shell.view == image.view
            assert await lookups(platform) == wanted
        before = {one.index_shard: one.position for one in done if one.rows}
        await story.run(10, killed=False)
        for one in rebuild_index(story.directory, engine):
            assert one.start >= before.get(one.index_shard, 0)
        assert verify_index(story.directory).difference is None


def compare_rows(
    rebuilt: dict[str, set[tuple[int, int, int]]],
    live: dict[str, set[tuple[int, int, int]]],
    image: LogImage,
) -> None:
    """Compare the rows of each index node."""
    alive = {seqnum for _, seqnum, _ in set().union(*rebuilt.values())}
    for node, rows in rebuilt.items():
        assert rows <= live[node]
        extra = {row for row in live[node] - rows if row[1] in alive}
        assert all(row[1] < image.floors.tags.of(row[0]) for row in extra)


@given(
    tags=st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=8),
    memory_bytes=st.integers(1, 2000),
)
def test_runs_are_merged_in_order_whatever_fits_into_memory(
    tags: list[list[int]], memory_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = SortedRuns(Path(folder), memory_bytes_max=memory_bytes)
        seqnum, wanted = 0, []
        for piece in tags:
            rows = sorted((tag, seqnum + n, tag + 1) for n, tag in enumerate(piece))
            seqnum += len(piece)
            wanted += rows
            columns = np.array(rows, np.uint64).reshape(-1, 3)
            runs.add(Rows(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.uint16)))
        for _ in range(2):
            assert [row for rows in runs.merged() for row in listed(rows)] == sorted(wanted)
        assert runs.rows == len(wanted)
