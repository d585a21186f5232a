"""A rebuilt snapshot says which records have lost tags."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from indilog.kernel.index_snapshot import opened_snapshot, read_rows, snapshot_files
from indilog.kernel.lost_ranges import LostRange
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.rebuild.run import rebuild_index
from indilog_pipeline.rebuild.verify import verify_index
from tests.unit.pipeline.test_record_batches import configured, fill
from tests.unit.runtime.journals import spoil


@pytest.mark.asyncio
async def test_records_with_lost_tags_have_the_empty_tag_only(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path)) as platform:
        await fill(platform.logs.log("orders"))
    batches = LogImage.read(tmp_path).batches
    start, records = int(batches.seqnums[3]), int(batches.records[3])
    image = LogImage.read(tmp_path)
    spoil(image.files[batches.files[3, 0]], int(batches.offsets[3, 0]) + 70, 10)
    shutil.rmtree(tmp_path / "snapshots", ignore_errors=True)
    assert {done.position for done in rebuild_index(tmp_path)} == {image.position}
    owner = image.view.index_shard_at(int(batches.positions[3]))
    folder = tmp_path / "snapshots" / image.view.index_shards[owner][0]
    parquet, snapshot = opened_snapshot(snapshot_files(folder)[0][1])
    assert snapshot.info.lost == (LostRange(start, start + records),)
    rows = [read_rows(parquet, group) for group in range(len(snapshot.groups.lowest))]
    lost = [
        (tag, seqnum)
        for part in rows
        for tag, seqnum in zip(part.tags.tolist(), part.seqnums.tolist(), strict=True)
        if start <= seqnum < start + records
    ]
    assert lost == [(0, seqnum) for seqnum in range(start, start + records)]
    assert verify_index(tmp_path).difference is None
