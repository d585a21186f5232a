"""A journal whose old segments are rewritten, with a role that names the batches it still needs."""

from __future__ import annotations

import random
from pathlib import Path

from indilog.base.ids import Epoch, Instant, LocalId, NodeId, ShardId, TagColumns, pack_tags
from indilog.base.metrics import Metrics
from indilog.config import node_config
from indilog.kernel.records import BatchBuilder, batch_header
from indilog.kernel.tombstones import decode_gone
from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.rewriting import Rewriting
from indilog.runtime.journal.segment_scan import Damage

NODE = NodeId("storage-0")
STREAM = stream_of(NODE)
SEGMENT_BYTES = 4096

Held = tuple[FrameKind, bytes]


def batch(first: LocalId, records: int = 2, size: int = 100, shard: int = 0) -> bytes:
    builder, chance = BatchBuilder(), random.Random(first)
    for _ in range(records):
        builder.add(chance.randbytes(size), TagColumns(pack_tags(1, 2), b"log"))
    return builder.build(shard=ShardId(shard), epoch=Epoch(1), first=first, time_us=1)


class Keeper:
    """A role that needs every batch, except those that a test removed.

    Attributes:
        gone: batches that the role no longer needs. smaller: smaller replacements of batches.
    """

    def __init__(self) -> None:
        self.gone: set[Location] = set()
        self.smaller: dict[Location, bytes] = {}

    def needed(self, kind: FrameKind, payload: bytes, location: Location, /) -> bytes | None:
        assert kind in {FrameKind.RECORDS, FrameKind.REPAIRED}
        places = {place[:2] for place in self.gone}
        if location[:2] in places:
            return None
        return next((b for p, b in self.smaller.items() if p[:2] == location[:2]), payload)


class Rewriter:
    """One run of a process, from its start to its end.

    Attributes:
        found: what recovery reported, damage as None.
    """

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, **settings: float
    ) -> None:
        self.directory = directory
        self.journal = Journal.open(directory, segment_bytes=segment_bytes, durability="fsync")
        self.found: list[Held | None] = []
        self.places: list[Location] = []
        for frame in self.journal.recover():
            if isinstance(frame, Damage):
                self.found.append(None)
            else:
                self.found.append((frame[1], frame[2]))
                self.places.append(frame[3])
        self.role = Keeper()
        node = node_config(**{"rewrite_bytes_per_s": 1 << 30, **settings})
        self.metrics = Metrics("storage-0")
        roles: dict[NodeId, Keeper] = {NODE: self.role}
        self.rewriting = Rewriting(self.journal, roles, node, lambda _: None, self.metrics)  # type: ignore[arg-type]
        self.now = Instant(1000.0)

    def write(self, payload: bytes, kind: FrameKind = FrameKind.RECORDS) -> Location:
        return self.journal.write(STREAM, kind, payload)

    def written(self, count: int, first: LocalId = 0) -> list[Location]:
        """Write the given number of consecutive batches durably."""
        places = [self.write(batch(first + 2 * number)) for number in range(count)]
        self.journal.sync()
        return places

    def discard(self, *places: Location) -> None:
        for place in places:
            self.role.gone.add(place)
            self.journal.discard(place)
        self.journal.sync()
        self.journal.free_discarded()

    def turn(self, seconds: float = 1.0) -> None:
        """Advance the time, and wait for the work of threads."""
        self.now = Instant(self.now + seconds)
        self.journal.free_discarded()
        self.rewriting.advance(self.now)
        self.journal.spare.pool.submit(int).result()

    def rest(self, turns: int = 200) -> int:
        """Rewrite every segment that is worth it; return the number of rewrites."""
        before = self.metrics.rewrites
        for _ in range(turns):
            self.turn()
        return self.metrics.rewrites - before

    def close(self) -> None:
        self.rewriting.close()
        self.journal.close()

    def again(self) -> Rewriter:
        """Return the next run of the process."""
        self.close()
        return Rewriter(self.directory)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files of old segments."""
        active = f"{self.journal.files.active:08d}"
        paths = sorted(self.directory.glob("segment-*.log"))
        return {
            name: path.stat().st_size
            for path in paths
            if (name := path.stem.removeprefix("segment-")) < active
        }


def localids(found: list[Held | None]) -> list[tuple[FrameKind, LocalId, LocalId]]:
    """Return the localids of the frames of shard 0."""
    spans = []
    for frame in found:
        assert frame is not None
        kind, payload = frame
        records = decode_gone(payload) if kind is FrameKind.GONE_RECORDS else batch_header(payload)
        spans.append((kind, records.first, records.end))
    return spans
