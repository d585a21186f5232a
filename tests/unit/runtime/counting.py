"""A role that counts the frames of its journal, with checkpoints, and the process that runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from indilog.base.ids import Instant
from indilog.roles.role import Effect, Event, FrameKind, Location, Lost
from indilog.runtime.journal.checkpointing import Checkpointing
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover

STREAM = 7
SEGMENT_BYTES = 4096


def numbered(number: int) -> bytes:
    """Return the payload of a frame."""
    return b"%06d" % number * 20


class Counter:
    """Knows how many frames there are; each must follow on the one before.

    Attributes:
        count: frames, replayed or in the checkpoint. replayed: those that were replayed.
        restored: what the checkpoint said; None: there was none.
        gone: segments that were missing. lost: frames that could not be read.
        unsaved: its state that no frame holds.
        wants_checkpoint: whether it wants one now.
    """

    def __init__(self) -> None:
        self.count = 0
        self.replayed = 0
        self.restored: int | None = None
        self.gone: set[int] = set()
        self.lost_frames: list[Lost] = []
        self.unsaved = 0
        self.wants_checkpoint = False

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        if kind is FrameKind.RECORDS:
            return
        assert kind is FrameKind.METALOG, location
        number = int(payload[:6])
        assert number == self.count or self.lost_frames, "frames follow on one another"
        self.count = number + 1
        self.replayed += 1

    def lost(self, frame: Lost, /) -> None:
        self.lost_frames.append(frame)

    def recovered(self) -> None:
        """Do nothing: this role has nothing to check after recovery."""

    @property
    def derived(self) -> bool:
        return False

    def checkpoint(self) -> Callable[[], bytes]:
        count = self.count
        return lambda: b"%d" % count

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        self.count = self.restored = int(payload)
        self.gone = set(gone)

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        raise AssertionError((events, now))

    def deadline(self) -> Instant | None:
        return None

    def check_invariants(self) -> None:
        return


class ProcessRun:
    """One run of a process with that role, from its start to its end or crash."""

    def __init__(self, directory: Path, *, frames: int = 1_000_000) -> None:
        self.journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
        self.role = Counter()
        recover(self.journal, {STREAM: self.role})
        self.checkpointing = Checkpointing(
            self.journal, {STREAM: self.role}, lambda _: None, frames=frames
        )
        self.checkpointing.start()

    def write(self, count: int = 1) -> None:
        """Write frames that are not durable yet."""
        for _ in range(count):
            self.journal.write(STREAM, FrameKind.METALOG, numbered(self.role.count))
            self.role.count += 1

    def turn(self, *, quiet: bool = True) -> None:
        """End a loop iteration, and wait for the work of threads."""
        self.checkpointing.advance(quiet=quiet)
        self.journal.sync()
        self.journal.spare.pool.submit(int).result()

    def checkpoint(self) -> None:
        """Have a checkpoint of the current state written."""
        before = self.checkpointing.written
        self.checkpointing.stop(quiet=True)
        assert self.checkpointing.written == before + 1

    def end(self, *, clean: bool = False) -> None:
        """End the process; clean: with a checkpoint."""
        if clean:
            self.checkpointing.stop(quiet=True)
        self.journal.close()
