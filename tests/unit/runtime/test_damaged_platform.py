"""A platform with one replica and a damaged disk loses only the records of the damaged batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

import indilog.client
from bokiflow import Flow, Workflow
from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.log import Log, Record
from indilog.config import MIB, Config, node_config
from indilog.link.link_messages import error_from, failed
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import embedded, status_of
from indilog.runtime.journal.checkpoint_files import checkpoint_path, checkpoint_places
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from indilog_compute.deployments import Deployment, DeploymentLog
from tests.unit.bokiflow.processes import kill
from tests.unit.runtime.journals import spoil

CONFIG = Config(node=node_config(segment_bytes=8 * MIB))


def spoil_batch(directory: Path, index: int, *, whole: bool) -> None:
    """Damage the end of a batch on disk, or all of its frame."""
    path = segment_path(directory / "journal", 1)
    frames = [frame for frame in SegmentScan(path, 1, newest=True) if not isinstance(frame, Damage)]
    batches = [place for header, _, place in frames if header.kind == FrameKind.RECORDS]
    place = batches[index]
    if whole:
        spoil(path, place.offset - 32, place.length + 32)
    else:
        spoil(path, place.offset + place.length - 40, 20)


def spoil_batches_with(directory: Path, *texts: bytes) -> int:
    """Damage the end of each batch whose bytes contain all `texts`; return their number."""
    path = segment_path(directory / "journal", 1)
    frames = [frame for frame in SegmentScan(path, 1, newest=True) if not isinstance(frame, Damage)]
    batches = [payload for header, payload, _ in frames if header.kind == FrameKind.RECORDS]
    found = [n for n, payload in enumerate(batches) if all(text in payload for text in texts)]
    for index in reversed(found):  # a damaged one no longer counts
        spoil_batch(directory, index, whole=False)
    return len(found)


def lose_tags(directory: Path, index: int) -> None:
    """Damage a whole batch, and remove the checkpoints, which may hold its tags too."""
    spoil_batch(directory, index, whole=True)
    journal = directory / "journal"
    places = checkpoint_places(journal)
    assert places, "a clean stop writes a checkpoint"
    for place in places:
        checkpoint_path(journal, place).unlink()


@pytest.mark.asyncio
async def test_damage_on_a_single_replica_loses_only_the_records_of_the_damaged_batch(
    tmp_path: Path,
) -> None:
    """A5, without another replica to repair from. Tags are readable, so no read skips the lost
    record.
    """
    async with indilog.client.open(tmp_path, CONFIG) as client:
        log = client.log("orders")
        for number in range(6):
            await log.append(b"%d" % number * 50, tags=[f"t{number % 2}"])
    spoil_batch(tmp_path, 2, whole=False)
    for _ in range(2):
        async with indilog.client.open(tmp_path, CONFIG) as client:
            log = client.log("orders")
            for tag in ("t0", None):
                with pytest.raises(DataLossError, match="holds seqnum 2") as lost:
                    await log.read_next(tag, bound=2)
                assert (lost.value.seqnum, lost.value.next_seqnum) == (2, 3)
            assert [r.seqnum for r in await log.read_range("t0", bound=0)] == [0]
            assert [r.seqnum for r in await log.read_range("t0", bound=3)] == [4]
            assert [r.seqnum for r in await log.read_range("t1", bound=0)] == [1, 3, 5]


@pytest.mark.asyncio
@pytest.mark.parametrize("index", ["none", "default", "extended"])
async def test_no_read_skips_a_batch_whose_tags_are_lost(
    tmp_path: Path, index: Literal["none", "default", "extended"]
) -> None:
    """D9: an unknown record never counts as absent, with one copy and after any number of
    restarts.
    """
    config = Config(node=node_config(segment_bytes=8 * MIB, local_index=index))
    async with indilog.client.open(tmp_path, config) as client:
        log = client.log("orders")
        for number in range(6):
            await log.append(b"%d" % number * 50, tags=[f"t{number % 2}"])
    lose_tags(tmp_path, 2)
    for again in range(3):
        async with indilog.client.open(tmp_path, config) as client:
            log = client.log("orders")
            with pytest.raises(DataLossError, match="holds seqnum 2"):
                await log.read(2)
            more = list(range(6, 6 + again))
            wanted = {"t0": [0, 4, *more], "t1": [1, 3, 5], "t2": [], None: [0, 1, 3, 4, 5, *more]}
            for tag, seqnums in wanted.items():
                assert await seen(log, tag) == [*[s for s in seqnums if s < 2], "2 to 3"] + [
                    s for s in seqnums if s > 2
                ]
                for bound in range(3):
                    before = [s for s in seqnums if bound <= s < 2]
                    assert await first(log, tag, bound) == (before[0] if before else "2 to 3")
                for bound in (2, 3, 2**60):
                    behind = [s for s in seqnums if 2 < s <= bound]
                    assert await last(log, tag, bound) == (behind[-1] if behind else "2 to 3")
            assert await first(client.log("other"), None, 0) == "2 to 3", "it may have been there"
            assert await first(log, "t2", 3) is None
            assert await log.append(b"more", tags=["t0"]) == 6 + again
            assert await last(log, "t0", 2**60) == 6 + again


@pytest.mark.asyncio
async def test_tags_in_a_checkpoint_outlive_their_batch(tmp_path: Path) -> None:
    """Only reads of the lost record's sub-streams raise (decision 0028)."""
    async with indilog.client.open(tmp_path, CONFIG) as client:
        for number in range(6):
            await client.log("orders").append(b"%d" % number * 50, tags=[f"t{number % 2}"])
    spoil_batch(tmp_path, 2, whole=True)
    for _ in range(3):
        async with indilog.client.open(tmp_path, CONFIG) as client:
            log = client.log("orders")
            assert await seen(log, "t0") == [0, "2 to 3", 4]
            assert await seen(log, "t1") == [1, 3, 5]
            assert await seen(log, None) == [0, 1, "2 to 3", 3, 4, 5]
            assert await first(client.log("other"), None, 0) is None


async def seen(log: Log, tag: str | None) -> list[object]:
    """Return the outcomes of reading a sub-stream, in order: seqnums, and positions of failed
    reads.
    """
    found: list[object] = []
    bound = 0
    while True:
        try:
            page = await log.read_range(tag, bound)
        except DataLossError as error:
            found.append(f"{error.seqnum} to {error.next_seqnum}")
            bound = max(bound + 1, error.next_seqnum or 0)
            continue
        if not page:
            return found
        found += [record.seqnum for record in page]
        bound = page[-1].seqnum + 1


async def first(log: Log, tag: str | None, bound: int) -> object:
    return await outcome_of(log.read_next(tag, bound))


async def last(log: Log, tag: str | None, bound: int) -> object:
    return await outcome_of(log.read_prev(tag, bound))


async def outcome_of(read: Awaitable[Record | None]) -> object:
    try:
        record = await read
    except DataLossError as error:
        return f"{error.seqnum} to {error.next_seqnum}"
    return record.seqnum if record is not None else None


@pytest.mark.asyncio
@pytest.mark.parametrize("whole", [True, False])
async def test_a_lost_deployment_is_reported_and_repaired_by_a_new_deployment(
    tmp_path: Path, *, whole: bool
) -> None:
    config = Config(node=node_config(segment_bytes=8 * MIB, data_dir=tmp_path, workers=0))

    def deployment(name: str) -> Deployment:
        return Deployment(name=name, version=1, owner="me", sources={"a.py": "#"}, functions=())

    async with embedded(config) as platform:
        deployments = DeploymentLog(platform.logs)
        places = [await deployments.append(deployment(name)) for name in ("a", "b", "c")]
    path = segment_path(tmp_path / "journal", 1)
    found = [one for one in SegmentScan(path, 1, newest=True) if not isinstance(one, Damage)]
    batches = [place for header, _, place in found if header.kind == FrameKind.RECORDS]
    place = batches[-2]
    spoil(path, place.offset + (60 if whole else place.length - 9), 5)
    for again in range(2):
        async with embedded(config) as platform:
            deployments = DeploymentLog(platform.logs)
            await deployments.catch_up()
            assert sorted(deployments.newest) == (["a", "b", "c"] if again else ["a", "c"])
            assert sorted(deployments.lost) == ([] if whole or again else ["b"])
            assert f"[{places[1]}, {places[1] + 1})" in deployments.losses.sentence
            if not again:
                await deployments.append(deployment("b"))


@pytest.mark.asyncio
async def test_a_lost_range_below_the_trim_floor_is_forgotten(tmp_path: Path) -> None:
    async with indilog.client.open(tmp_path, CONFIG) as client:
        for number in range(6):
            await client.log("orders").append(b"%d" % number * 50, tags=["t"])
    lose_tags(tmp_path, 2)
    async with indilog.client.open(tmp_path, CONFIG) as client:
        orders, other = client.log("orders"), client.log("other")
        await orders.trim(2)
        assert await first(orders, "t", 2) == "2 to 3", "the floor is below it"
        await orders.trim(3)
        assert await first(orders, "t", 3) == 3
        with pytest.raises(TrimmedError):
            await orders.read_prev("u")
        assert await last(other, None, 2**60) == "2 to 3", "another log has another floor"
        await other.trim(3, tag="v")
        with pytest.raises(TrimmedError):
            await other.read_prev("v")


@pytest.mark.asyncio
async def test_a_subscription_yields_the_records_before_lost_ones_and_then_raises(
    tmp_path: Path,
) -> None:
    async with indilog.client.open(tmp_path, CONFIG) as client:
        for number in range(4):
            await client.log("orders").append(b"%d" % number * 50)
    spoil_batch(tmp_path, 2, whole=True)
    async with indilog.client.open(tmp_path, CONFIG) as client:
        subscription = client.log("orders").subscribe()
        assert [(await anext(subscription)).seqnum for _ in range(2)] == [0, 1]
        with pytest.raises(DataLossError) as lost:
            await anext(subscription)
        assert (lost.value.seqnum, lost.value.next_seqnum) == (2, 3)


@pytest.mark.asyncio
async def test_permanently_lost_records_are_shown_in_the_status(tmp_path: Path) -> None:
    """A5: most reads cannot know of the loss after a restart, so the status reports it."""
    config = Config(node=node_config(segment_bytes=8 * MIB, data_dir=tmp_path, workers=0))

    async def status() -> dict[str, Any]:
        async with embedded(config) as platform:
            return status_of(platform.shell, platform.logs)

    async with indilog.client.open(tmp_path, config) as client:
        for number in range(6):
            await client.log("orders").append(b"%d" % number * 50)
    whole = await status()
    assert (whole["lost_records"], "warning" in whole) == (0, False)
    spoil_batch(tmp_path, 2, whole=False)
    for _ in range(2):
        damaged = await status()
        assert damaged["lost_records"] == 1
        assert damaged["warning"].startswith("Lost records: 1, the first one at seqnum 2;")


@pytest.mark.asyncio
async def test_a_bad_sector_loses_its_records_but_no_ordering(tmp_path: Path) -> None:
    """Metalog entries in the sector are found in the ordering journal of the same process."""
    count = 300
    async with indilog.client.open(tmp_path, CONFIG) as client:
        log = client.log("orders")
        for number in range(count):
            await log.append(b"%d" % number)
    spoil(segment_path(tmp_path / "journal", 1), 3 * 4096, 4096)
    async with indilog.client.open(tmp_path, CONFIG) as client:
        log = client.log("orders")
        outcomes = await seen(log, None)
        found = [seqnum for seqnum in outcomes if isinstance(seqnum, int)]
        for seqnum in found:
            record = await log.read(seqnum)
            assert record is not None
            assert record.data == b"%d" % seqnum
        assert await log.append(b"more") == count
    assert count - 30 < len(found) < count
    assert len(outcomes) - len(found) < 5, "few errors report all lost records"


@pytest.mark.asyncio
async def test_a_page_reader_gets_one_error_for_a_lost_batch_and_continues_after_it(
    tmp_path: Path,
) -> None:
    """A5: a batch that is corrupted while the platform runs causes one error, not one per
    record.
    """
    config = Config(node=node_config(segment_bytes=8 * MIB, record_cache_bytes_max=0))
    async with indilog.client.open(tmp_path, config) as client:
        log = client.log("orders")
        for start in range(0, 50, 10):
            await asyncio.gather(*(log.append(b"%d" % (start + ahead)) for ahead in range(10)))
        spoil_batch(tmp_path, 2, whole=False)
        found: list[int] = []
        errors: list[DataLossError] = []
        bound = 0
        while bound < 50:
            try:
                page = await log.read_range(bound=bound)
            except DataLossError as loss:
                errors.append(loss)
                bound = loss.next_seqnum or 50
            else:
                found += [record.seqnum for record in page]
                bound = page[-1].seqnum + 1
    [raised] = errors
    assert raised.seqnum is not None
    assert raised.next_seqnum is not None
    assert f"on from seqnum {raised.next_seqnum}" in str(raised)
    lost = range(raised.seqnum, raised.next_seqnum)
    assert len(lost) > 1
    assert sorted([*found, *lost]) == list(range(50))
    again = error_from(failed(raised))
    assert (vars(again), str(again)) == (vars(raised), str(raised)), "over a link too"


@pytest.mark.asyncio
async def test_a_workflow_resumes_although_all_claims_of_its_dead_process_are_corrupt(
    tmp_path: Path,
) -> None:
    """The start of another run is corrupt, too."""

    async def waits(wf: Workflow) -> str:
        return str(await wf.signal("go"))

    config = Config(node=node_config(segment_bytes=8 * MIB, record_cache_bytes_max=0))
    async with indilog.client.open(tmp_path, config) as client:
        dead, other = Flow("shop", lease=0.5), Flow("shop", lease=0.5)
        begun = [flow.workflow(waits) for flow in (dead, other)]
        for flow in (dead, other):
            flow.attach(client)
        await begun[0].start(id="lost")
        await begun[0].start(id="r")
        kill(dead)
        assert spoil_batches_with(tmp_path, b"claimed") >= 2
        assert spoil_batches_with(tmp_path, b"started", b"lost") == 1
        driver = asyncio.create_task(other.drive(client))
        handle = begun[1].handle("r")
        await handle.signal("go", "on")
        assert await handle.result(60) == "on"
        with pytest.raises(DataLossError):
            await begun[1].handle("lost").status()
        driver.cancel()
        with suppress(asyncio.CancelledError):
            await driver
