"""Crashes of the journal: all synced frames are recovered, and of the rest exactly a prefix.

The model is a list of frames and the number of them that were synced. A crash copies the files as a
disk could be found: each sector of unsynced bytes may be old, new or garbage.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import Epoch, ShardId, TagColumns, pack_tags
from indilog.kernel.records import BatchBuilder
from indilog.roles.role import FrameKind
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.journal_directory import FORMAT_VERSION, format_line
from indilog.runtime.journal.segment import BATCH_KINDS
from indilog.runtime.journal.segment_scan import Damage

SEGMENT_BYTES = 2048
SECTOR_BYTES = 64
ModelFrame = tuple[int, FrameKind, bytes]


class Run:
    """One run of a process that writes to a journal, and the frames it must find after its end."""

    def __init__(self, directory: Path, expected: list[ModelFrame], durable: int) -> None:
        self.journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
        self.directory = directory
        recovered = []
        for found in self.journal.recover():
            assert not isinstance(found, Damage)
            recovered.append(found[:3])
        assert recovered == expected[: len(recovered)]
        assert len(recovered) >= durable
        self.frames = recovered
        self.synced = len(recovered)
        self.disk = self.files()

    def files(self) -> dict[str, bytes]:
        # A thread prepares the next segment; wait for it, so that a seed always finds the same
        # files.
        self.journal.spare.pool.submit(int).result()
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def write(self, stream: int, kind: FrameKind, payload: bytes) -> None:
        segment = self.journal._number
        location = self.journal.write(stream, kind, payload)
        if location.segment != segment:
            # Rolling syncs what went before: nothing else may be in the new segment yet.
            self.synced = len(self.frames)
            self.disk = self.files()
        self.frames.append((stream, kind, payload))

    def sync(self) -> None:
        self.journal.sync()
        self.synced = len(self.frames)
        self.disk = self.files()

    def crash(self, directory: Path, chaos: random.Random) -> Path:
        """Return a directory as the machine finds it after a power loss."""
        self.journal.flush()
        files = self.files()
        shutil.copytree(self.directory, directory)
        for name, new in files.items():
            if name.startswith("segment-"):
                old = self.disk.get(name, bytes(len(new)))
                (directory / name).write_bytes(torn(old, new, chaos))
        self.journal.close()
        return directory


def torn(old: bytes, new: bytes, chaos: random.Random) -> bytes:
    """Mix synced with unsynced bytes, sector by sector."""
    mode = chaos.choice(["old", "new", "prefix", "any"])
    if mode in {"old", "new"}:
        return {"old": old, "new": new}[mode]
    cut = chaos.randrange(len(new) + 1)
    if mode == "prefix":
        return new[:cut] + old[cut:]
    sectors = []
    for start in range(0, len(new), SECTOR_BYTES):
        before, after = (data[start : start + SECTOR_BYTES] for data in (old, new))
        if before != after:
            after = chaos.choice([before, after, after, chaos.randbytes(len(after))])
            # Bytes that this write did not change lie in a sector that was synced.
            kept = sum(1 for _ in iter_equal_prefix(before, new[start : start + SECTOR_BYTES]))
            after = before[:kept] + after[kept:]
        sectors.append(after)
    return b"".join(sectors)


def iter_equal_prefix(first: bytes, second: bytes) -> list[int]:
    """Return the common prefix of both."""
    equal = []
    for one, other in zip(first, second, strict=True):
        if one != other:
            break
        equal.append(one)
    return equal


def payload_of(kind: FrameKind, size: int, chaos: random.Random) -> bytes:
    if kind not in BATCH_KINDS:
        return chaos.randbytes(size)
    builder = BatchBuilder()
    builder.add(chaos.randbytes(size), TagColumns(pack_tags(chaos.getrandbits(64)), b"log"))
    return builder.build(shard=ShardId(0), epoch=Epoch(1), first=size, time_us=1)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_all_synced_frames_survive_any_crash_and_no_lost_frame_reappears(
    seed: int, runs: int
) -> None:
    chaos = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "run-0"
        expected: list[ModelFrame] = []
        durable = 0
        for number in range(1, runs + 1):
            run = Run(directory, expected, durable)
            for _ in range(chaos.randrange(12)):
                own = {FrameKind.GONE, FrameKind.CHECKPOINT, FrameKind.MOVED}
                kind = chaos.choice([k for k in FrameKind if k not in own])
                # Few different payloads: a new frame may equal a lost one.
                payload = payload_of(
                    kind, chaos.choice([0, 5, 8, 300]), random.Random(chaos.randrange(2))
                )
                run.write(chaos.randrange(3), kind, payload)
                if chaos.random() < 0.3:
                    run.sync()
            expected, durable = run.frames, run.synced
            directory = run.crash(Path(temporary) / f"run-{number}", chaos)
        Run(directory, expected, durable).journal.close()


@given(st.binary(max_size=40))
def test_any_format_file_is_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "FORMAT").write_bytes(text)
        try:
            journal = Journal.open(Path(temporary), segment_bytes=SEGMENT_BYTES, durability="fsync")
        except DataDirectoryError:
            assert text.strip() != format_line(FORMAT_VERSION).strip().encode()
        else:
            journal.close()
