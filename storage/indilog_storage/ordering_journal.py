"""The write buffer of the ordering journal: applied metalog entries that are in no `ORDERING` frame
yet.

Entries are batched. This is safe, because a node fetches entries again that a crash lost. Entries
from other storage nodes are not written: the next checkpoint has them (`indilog_storage.history`).
An empty frame, a *gap*, replaces them. After a gap, recovery accepts an entry that does not follow
the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import MetalogPosition
from indilog.kernel.metalog import Entry, decode_entries, encode_entries
from indilog.roles.role import FrameKind, Persist

TOKEN = 0
"""The token of all `ORDERING` frames: nothing waits for them."""


class OrderingJournal:
    """The content of the next `ORDERING` frames.

    Attributes:
        pending: applied entries that are in no frame yet, consecutive.
        gap: whether a gap frame is due after `pending`.
    """

    __slots__ = ("gap", "pending")

    def __init__(self) -> None:
        self.pending: list[Entry] = []
        self.gap = False

    def add(self, entry: Entry) -> list[Persist]:
        """Add the next applied entry; return the frames that must precede it."""
        frames = self.flush() if self.gap else []
        assert not self.pending or entry.position == self.pending[-1].position + 1, "consecutive"
        self.pending.append(entry)
        return frames

    def skip(self) -> None:
        """Note that entries were applied that no frame will contain."""
        self.gap = True

    def flush(self) -> list[Persist]:
        """Return frames for all pending entries and the gap."""
        frames = [_frame(self.pending)] if self.pending else []
        if self.gap:
            frames.append(_frame(()))
        self.pending, self.gap = [], False
        return frames

    def cut_off(self, position: MetalogPosition) -> None:
        """Remove pending entries from `position` on: the primary has replaced them.

        Entries that are on disk already stay there: in a replay a later entry at the same position
        wins.
        """
        self.pending = [entry for entry in self.pending if entry.position < position]

    # --- checkpoints and recovery

    def restore(self, pending: Sequence[Entry], *, gap: bool) -> None:
        """Restore from a checkpoint; its pending entries are still to be written.

        A start from the checkpoint before this one finds them only in the journal.
        """
        self.pending, self.gap = [*pending], gap

    def recover(self, payload: bytes) -> None:
        """Replay a frame; an empty frame is a gap.

        The first frame after a checkpoint contains the checkpoint's pending entries, so these are
        dropped here.

        Raises:
            MalformedFrameError: the frame cannot be decoded.
        """
        self.pending = []
        if self.gap and not decode_entries(payload):
            self.gap = False


def _frame(entries: Sequence[Entry]) -> Persist:
    return Persist(FrameKind.ORDERING, encode_entries(entries), TOKEN)
