"""Journals whose segments are rewritten, compared with a list. After discards, shrinking, rewrites,
joins and reopening in any order, live frames are read and recovered unchanged and in order.
Discarded frames are known as such.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from indilog.kernel.records import RecordBatch, batch_header
from indilog.kernel.tombstones import decode_gone
from indilog.roles.role import FrameKind, Location
from tests.unit.runtime.rewriters import Rewriter, batch


class Written:
    """A frame in the model; `versions` are the payloads that may be read, the smallest last."""

    def __init__(self, place: Location, payload: bytes, kind: FrameKind) -> None:
        self.place = place
        self.versions = [payload]
        self.kind = kind
        self.gone = False


class Story:
    """A journal, its model, and the operations on both."""

    def __init__(self, directory: Path, chaos: random.Random) -> None:
        self.chaos = chaos
        self.rewriter = Rewriter(directory)
        self.model: list[Written] = []
        self.next = [0, 0]

    def write(self) -> None:
        for _ in range(self.chaos.randint(1, 12)):
            if self.chaos.random() < 0.2:
                kind = self.chaos.choice([FrameKind.METALOG, FrameKind.ORDERING])
                payload = self.chaos.randbytes(self.chaos.randint(1, 60))
            else:
                kind, shard = FrameKind.RECORDS, self.chaos.randrange(2)
                records = self.chaos.randint(1, 3)
                size = self.chaos.choice([0, 50, 400])
                payload = batch(self.next[shard], records, size, shard)
                self.next[shard] += records
            self.model.append(Written(self.rewriter.write(payload, kind), payload, kind))
        self.rewriter.journal.sync()

    def _batches(self) -> list[Written]:
        return [w for w in self.model if w.kind is FrameKind.RECORDS and not w.gone]

    def discard(self) -> None:
        share = self.chaos.choice([0.2, 0.6, 1.0])
        dead = [written for written in self._batches() if self.chaos.random() < share]
        for written in dead:
            written.gone = True
        self.rewriter.discard(*(written.place for written in dead))

    def mark_reclaimable(self) -> None:
        """Mark parts of some batches as reclaimable; a rewrite turns these parts into
        tombstones.
        """
        reclaimable: dict[int, int] = {}
        for written in self._batches():
            if self.chaos.random() < 0.5:
                found = RecordBatch(written.versions[-1])
                smaller = found.with_tombstones(
                    [self.chaos.random() < 0.5 for _ in range(len(found))]
                )
                self.rewriter.role.smaller[written.place] = smaller
                written.versions.append(smaller)
                size = len(written.versions[0]) - len(smaller)
                reclaimable[written.place.segment] = (
                    reclaimable.get(written.place.segment, 0) + size
                )
        self.rewriter.journal.old.set_reclaimable("storage-0", reclaimable, began=self.rewriter.now)

    def rewrite(self) -> None:
        self.rewriter.rest(self.chaos.choice([1, 2, 5, 60]))

    def open_again(self) -> None:
        self.rewriter = self.rewriter.again()
        assert None not in self.rewriter.found
        expected = iter(self.model)
        for frame, place in zip(self.rewriter.found, self.rewriter.places, strict=True):
            assert frame is not None
            kind, payload = frame
            # Notes of discarded frames lie in between; live frames come in order.
            if kind not in {FrameKind.GONE, FrameKind.GONE_RECORDS}:
                written = self._next_found(expected, payload)
                assert kind is written.kind
                written.versions, written.place, written.gone = [payload], place, False
        assert all(written.gone for written in expected)
        self._check_gone()
        # Discarded frames are known by their records now, not by a location.
        self.model = [written for written in self.model if not written.gone]

    @staticmethod
    def _next_found(expected: Iterator[Written], payload: bytes) -> Written:
        """Return the frame that was found: the next live one, or a whole one before it.

        A frame before it was discarded during the rewrite of its file, and the stop came before its
        mark.
        """
        for written in expected:
            if payload in written.versions:
                return written
            assert written.gone, "live frames come in order"
        raise AssertionError("a frame was found that was never written")

    def _check_gone(self) -> None:
        """Check that every localid is in exactly one frame."""
        localids: list[list[int]] = [[], []]
        for frame in self.rewriter.found:
            assert frame is not None
            kind, payload = frame
            if kind is FrameKind.GONE_RECORDS:
                gone = decode_gone(payload)
                localids[gone.shard] += range(gone.first, gone.end)
            elif kind in {FrameKind.RECORDS, FrameKind.GONE}:
                header = batch_header(payload)
                localids[header.shard] += range(header.first, header.end)
        assert localids == [list(range(end)) for end in self.next]

    def check(self) -> None:
        for written in self._batches():
            assert self.rewriter.journal.read(written.place) in written.versions


@given(st.integers(0, 2**32))
def test_live_frames_are_read_and_recovered_after_any_rewrites(seed: int) -> None:
    chaos = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        story = Story(Path(temporary), chaos)
        for _ in range(chaos.randint(2, 14)):
            steps = [
                story.write,
                story.discard,
                story.mark_reclaimable,
                story.rewrite,
                story.open_again,
            ]
            chaos.choices(steps, [4, 4, 2, 5, 1])[0]()
            story.check()
        story.open_again()
        story.check()
        story.rewriter.close()
