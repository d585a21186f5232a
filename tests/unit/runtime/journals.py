"""Journals that are opened repeatedly, and whose files are damaged in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, ShardId, TagColumns, pack_tags
from indilog.kernel.records import BatchBuilder
from indilog.roles.role import Effect, Event, FrameKind, Location
from indilog.runtime.journal.journal import Durability, Journal
from indilog.runtime.journal.segment_scan import Damage

SEGMENT_BYTES = 4096
STREAM = 7

Frame = tuple[int, FrameKind, bytes, Location]


class Taker:
    """A role that accepts any frame, up to one that it refuses."""

    def __init__(self, refused: FrameKind | None = None) -> None:
        self.refused = refused

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        if kind is self.refused:
            raise DataLossError(f"not {len(payload)} bytes at {location}")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        raise AssertionError((events, now))

    def deadline(self) -> Instant | None:
        return None

    def check_invariants(self) -> None:
        return


def started(
    directory: Path, opened: list[Journal], durability: Durability = "fsync"
) -> tuple[Journal, list[Frame]]:
    """Open the journal, closing the one before, and return what it recovers."""
    if opened:
        opened[-1].close()
    journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability=durability)
    opened.append(journal)
    found = list(journal.recover())
    damaged = [damage for damage in found if isinstance(damage, Damage)]
    assert journal.damaged == len(damaged)
    return journal, [frame for frame in found if not isinstance(frame, Damage)]


def kill(journal: Journal) -> None:
    """End the journal as kill -9 does: what is written stays in the page cache."""
    journal.flush()
    journal._failed = True
    journal.close()


def damage_in(directory: Path, opened: list[Journal]) -> list[tuple[int, int, int]]:
    """Return the damaged locations that recovery reports, and leave the journal to a later call."""
    if opened:
        opened[-1].close()
    journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    opened.append(journal)
    found = [damage for damage in journal.recover() if isinstance(damage, Damage)]
    return [(damage.segment, damage.start, damage.end) for damage in found]


def batch(records: int = 3, *, first: int = 0) -> bytes:
    builder = BatchBuilder()
    for number in range(records):
        builder.add(f"data {number}".encode(), TagColumns(pack_tags(1, 2), b"orders"))
    return builder.build(shard=ShardId(0), epoch=Epoch(1), first=first, time_us=5)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def spoil(path: Path, offset: int, size: int = 64) -> None:
    """Overwrite bytes of a file so that they are no valid frame."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * size)
