"""Power loss after every single file operation of the journal and of the metadata store: all
promises hold, and the next start succeeds (A3).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from indilog.config import NodeConfig
from indilog.kernel.records import batch_header
from indilog.roles.role import FrameKind
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.segment_scan import Damage
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from tests.properties.storage.power_loss import Promised, Recorder, Synced
from tests.unit.runtime.counting import ProcessRun
from tests.unit.runtime.rewriters import Rewriter, batch, localids

SEGMENT_BYTES = 4096
SUBSETS = 6
"""Number of subsets of the unsynced data that are tried after each operation."""


def open_journal(directory: Path) -> Journal:
    return Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")


def payload(number: int) -> bytes:
    return b"%06d" % number * 80


def recovered(journal: Journal) -> list[bytes]:
    frames = []
    for found in journal.recover():
        assert not isinstance(found, Damage), "a torn tail is no damage"
        frames.append(found[2])
    return frames


def write_run(recorder: Recorder, directory: Path, start: int, count: int) -> None:
    """Run a journal: frames, a sync now and then, rolls; each sync records a promise."""
    journal = open_journal(directory)
    assert recovered(journal) == [payload(number) for number in range(start)]
    recorder.promise(start)
    for number in range(start, start + count):
        journal.write(7, FrameKind.METALOG, payload(number))
        if number % 3 == 0:
            journal.sync()
            recorder.promise(number + 1)
        journal.flush()
        journal.spare.pool.submit(int).result()
    journal.close()
    recorder.promise(start + count)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    root = tmp_path / "root"
    root.mkdir()
    return Recorder(root, monkeypatch)


def state_of(directory: Path) -> tuple[tuple[str, bytes], ...]:
    """Return the names of all files, and a hash of the content of each."""
    return tuple(
        (str(path.relative_to(directory)), hashlib.sha256(path.read_bytes()).digest())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )


def behind_each(
    recorder: Recorder, tmp_path: Path, check: Callable[[Path, list[object]], None]
) -> None:
    """Lose power after each operation, and check the state that is found.

    Many are equal, with equal promises: only synced data is there. Each different one is checked
    once.
    """
    recorder.stop()
    checked: set[tuple[object, ...]] = set()
    for end in range(len(recorder.operations) + 1):
        for subset in range(SUBSETS):
            directory = tmp_path / f"found-{end}-{subset}"
            directory.mkdir()
            promises = recorder.after(end, directory, random.Random(1000 * end + subset))
            if (state := (state_of(directory), len(promises))) in checked:
                shutil.rmtree(directory)
                continue
            checked.add(state)
            with structlog.testing.capture_logs():
                check(directory, promises)


def test_a_journal_keeps_its_promises_after_a_power_loss_at_any_file_operation(
    tmp_path: Path, recorder: Recorder
) -> None:
    root = tmp_path / "root" / "journal"
    write_run(recorder, root, 0, 20)
    write_run(recorder, root, 20, 5)

    def check(found: Path, promises: list[object]) -> None:
        durable = max((p for p in promises if isinstance(p, int)), default=0)
        for _ in range(2):
            journal = open_journal(found / "journal")
            frames = recovered(journal)
            assert frames == [payload(number) for number in range(len(frames))]
            assert len(frames) >= durable
            durable = len(frames)
            journal.close()

    behind_each(recorder, tmp_path, check)


def test_frames_recovered_after_a_kill_survive_a_power_loss(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: a kill precedes any sync, so the frames that the next process finds may be in the page
    cache only.
    """
    write_run(recorder, tmp_path / "root" / "journal", 0, 20)
    recorder.stop()
    done = recorder.operations
    ready = next(count for count, operation in enumerate(done) if isinstance(operation, Promised))
    for count in (n for n in range(ready, len(done)) if isinstance(done[n], Synced)):
        root = tmp_path / f"killed-{count}"
        root.mkdir()
        again = recorder.killed(count, root, monkeypatch)
        with structlog.testing.capture_logs():
            journal = open_journal(root / "journal")
            frames = recovered(journal)
        again.stop()
        journal.close()
        for subset in range(SUBSETS):
            found = tmp_path / f"killed-{count}-{subset}"
            found.mkdir()
            again.after(len(again.operations), found, random.Random(1000 * count + subset))
            with structlog.testing.capture_logs():
                last = open_journal(found / "journal")
                assert recovered(last) == frames
            last.close()


def rewritten(directory: Path, recorder: Recorder) -> None:
    """Fill segments, discard frames of the first ones, and have them rewritten and joined."""
    one = Rewriter(directory)
    places = one.written(35)
    recorder.promise(35)
    one.discard(*(place for number, place in enumerate(places[:33]) if number % 5))
    one.rest(30)
    one.discard(*places[10:33:5])
    one.write(batch(70))
    one.journal.sync()
    recorder.promise(36)
    one.rest(30)
    assert len(one.sizes()) == 1
    one.close()


def test_a_crash_in_a_rewrite_leaves_the_old_segments_or_the_new_one(
    tmp_path: Path, recorder: Recorder
) -> None:
    """No live frame is lost, and the position of every discarded frame is known."""
    rewritten(tmp_path / "root" / "journal", recorder)

    def check(found: Path, promises: list[object]) -> None:
        promised = max((p for p in promises if isinstance(p, int)), default=0)
        for _ in range(2):
            again = Rewriter(found / "journal")
            spans = localids(again.found)
            ends = [0, *(end for _, _, end in spans)]
            assert [first for _, first, _ in spans] == ends[:-1], "spans are contiguous"
            assert ends[-1] >= 2 * promised
            living = {first for kind, first, _ in spans if kind is FrameKind.RECORDS}
            assert not promised or living >= {0, 10, 66, 68}
            for frame, place in zip(again.found, again.places, strict=True):
                if frame is not None and frame[0] is FrameKind.RECORDS:
                    assert again.journal.read(place) == batch(batch_header(frame[1]).first)
            again.close()

    behind_each(recorder, tmp_path, check)


def checkpointed(directory: Path, recorder: Recorder) -> None:
    """Write frames, with a checkpoint after every few; durable frames are recorded as promises."""
    for start in (0, 30):
        run = ProcessRun(directory, frames=6)
        assert run.role.count == start
        for number in range(start, start + 30):
            run.write()
            if number % 2:
                run.turn()
                recorder.promise(number + 1)
        run.end(clean=bool(start))
        recorder.promise(start + 30)


def test_a_power_loss_leaves_no_wrong_checkpoint_and_none_ahead_of_its_journal(
    tmp_path: Path, recorder: Recorder
) -> None:
    checkpointed(tmp_path / "root" / "journal", recorder)

    def check(found: Path, promises: list[object]) -> None:
        durable = max((p for p in promises if isinstance(p, int)), default=0)
        for _ in range(2):
            run = ProcessRun(found / "journal")
            assert run.role.count >= durable
            assert not run.role.lost_frames
            run.write()
            durable = run.role.count
            run.end()
            segments = (found / "journal").glob("segment-*.log")
            assert sum(path.stat().st_size for path in segments) < 20 * SEGMENT_BYTES

    behind_each(recorder, tmp_path, check)


def test_a_metadata_store_keeps_its_promises_after_a_power_loss_at_any_file_operation(
    tmp_path: Path, recorder: Recorder
) -> None:
    root = tmp_path / "root" / "metadata"

    async def write() -> None:
        with EmbeddedMetadataStore(root, NodeConfig()) as store:
            for number in range(3):
                await store.compare_and_set("key", b"%d" % number, expected_version=number)
                recorder.promise(("key", number + 1))
                recorder.promise(("epoch", await store.next_sequence("epoch")))

    asyncio.run(write())

    def check(found: Path, promises: list[object]) -> None:
        promised: dict[object, int] = dict(p for p in promises if isinstance(p, tuple))
        with EmbeddedMetadataStore(found / "metadata", NodeConfig()) as store:
            value = asyncio.run(store.get("key"))
            assert (value.version if value else 0) >= promised.get("key", 0)
            assert asyncio.run(store.next_sequence("epoch")) > promised.get("epoch", 0)

    behind_each(recorder, tmp_path, check)
