"""The image of a data directory holds what the platform's own reads return."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum, tag_hash
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import ReadCounts, read_records
from tests.properties.pipeline.stories import Story


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return names, times of change and contents of all files."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def rows_of(image: LogImage, **options: object) -> dict[SeqNum, tuple[object, ...]]:
    """Return all records of an image as `Story.read` spells them, with their logs."""
    found: dict[SeqNum, tuple[object, ...]] = {}
    for batch in read_records(image, **options):  # type: ignore[arg-type]
        batch.validate(full=True)
        for row in batch.to_pylist():
            tags = tuple(zip(row["tags"], row["tag_names"], strict=True))
            times = (round(row[name].timestamp() * 1e6) for name in ("time", "ordered_at"))
            assert row["seqnum"] not in found
            found[row["seqnum"]] = (row["log"], row["data"], tags, *times)
    assert list(found) == sorted(found)
    return found


async def expected(story: Story, directory: Path, tail: SeqNum) -> dict[SeqNum, tuple[object, ...]]:
    """Return what a platform started on a copy of the directory says of each record."""
    shutil.copytree(story.directory, directory)
    async with embedded(story.configured_for(directory)) as platform:
        return {
            seqnum: await story.read(platform.logs.log(story.appended[seqnum][0]), seqnum)
            for seqnum in range(tail)
            if seqnum in story.appended
        }


def compare(story: Story, image: LogImage, reads: dict[SeqNum, tuple[object, ...]]) -> None:
    """Assert that an image has the records that the platform reads, as they were appended.

    Which log a lost record was in is not known, so one below that log's floor is lost, too.
    """
    counts = ReadCounts()
    rows = rows_of(image, skip_lost=True, counts=counts)
    readable = {s: read for s, read in reads.items() if len(read) > 1}
    lost = {s for s, read in reads.items() if read == ("lost",)}
    assert set(rows) == set(readable)
    for seqnum, (log, data, tags, *times) in rows.items():
        name, entry = story.appended[seqnum]
        assert (log, data) == (name, entry.data)
        assert tags == tuple((signed(tag_hash(name, tag)), str(tag)) for tag in entry.tags)
        assert (data, tuple(entry.tags), *times) == readable[seqnum]
    assert counts.records == len(rows)
    trimmed = len(reads) - len(readable) - len(lost)
    assert len(lost) <= counts.lost + counts.damaged <= len(lost) + trimmed


def signed(tag: int) -> int:
    return tag - (1 << 64) if tag >> 63 else tag


@pytest.mark.timeout(300)
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 1 << 32),
    replicas=st.sampled_from((1, 1, 2)),
    kills=st.lists(st.booleans(), min_size=1, max_size=3),
    damaged=st.sampled_from((0, 0, 1, 3)),
    torn=st.booleans(),
)
def test_an_image_holds_what_the_platform_reads(
    seed: int, replicas: int, kills: list[bool], damaged: int, torn: bool
) -> None:
    """Trims, rewritten segments, checkpoints, torn tails, damage, kill -9."""
    asyncio.run(_an_image_holds(seed, replicas, kills, damaged, torn))


async def _an_image_holds(
    seed: int, replicas: int, kills: list[bool], damaged: int, torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder, "data"), random.Random(seed), replicas=replicas)
        for killed in kills:
            await story.run(40, killed=killed)
        story.damage(damaged)
        if torn and kills[-1]:
            story.tear()
        before = tree(story.directory)
        try:
            image = LogImage.read(story.directory)
        except DataLossError:
            with pytest.raises(DataLossError):
                await expected(story, Path(folder, "oracle"), 0)
            return
        try:
            reads = await expected(story, Path(folder, "oracle"), image.tail)
        except DataLossError:
            assert damaged, (
                "only damage of most copies of the metalog keeps a platform from starting"
            )
            return
        compare(story, image, reads)
        assert tree(story.directory) == before
        if not damaged:
            assert image.tail > max(story.appended)
            assert not len(image.lost)
