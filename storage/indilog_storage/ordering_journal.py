"""The write buffer of the ordering journal: applied metalog entries that are in no `ORDERING` frame
yet.

Entries are written in batches. This is safe, because after a crash the node fetches lost entries
again. Entries from other storage nodes are not written: the next checkpoint contains them
(`indilog_storage.history`). An empty frame, a *gap*, takes their place. After a gap, recovery
accepts an entry that does not follow the last recovered entry.

`StorageNode` owns the one `OrderingJournal`, and `Recovery` replays its frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import MetalogPosition
from indilog.kernel.metalog import Entry, decode_entries, encode_entries
from indilog.roles.role import FrameKind, Persist

TOKEN = 0
"""The token of all `ORDERING` frames. No work waits for these frames."""


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
        """Add the next applied entry. Return the frames that must be written before it."""
        frames = self.flush() if self.gap else []
        assert not self.pending or entry.position == self.pending[-1].position + 1, "consecutive"
        self.pending.append(entry)
        return frames

    def skip(self) -> None:
        """Note that entries were applied that no frame will contain."""
        self.gap = True

    def flush(self) -> list[Persist]:
        """Return frames for all pending entries, and for the gap if one is due."""
        frames = [_frame(self.pending)] if self.pending else []
        if self.gap:
            frames.append(_frame(()))
        self.pending, self.gap = [], False
        return frames

    def cut_off(self, position: MetalogPosition) -> None:
        """Remove pending entries from `position` on, because the primary has replaced them.

        Entries that are already on disk stay there. If the journal has two entries of the same
        position, a replay replaces the earlier entry by the later entry.
        """
        self.pending = [entry for entry in self.pending if entry.position < position]

    # --- checkpoints and recovery

    def restore(self, pending: Sequence[Entry], *, gap: bool) -> None:
        """Restore the entries that were pending at a checkpoint; they are still to be written.

        The journal must have them, because a start from the checkpoint before this checkpoint finds
        these entries only in the journal.
        """
        self.pending, self.gap = [*pending], gap

    def recover(self, payload: bytes) -> None:
        """Replay a frame; an empty frame is a gap.

        The first frame after a checkpoint contains the checkpoint's pending entries, so these
        entries are dropped here.

        Raises:
            MalformedFrameError: the frame cannot be decoded.
        """
        self.pending = []
        if self.gap and not decode_entries(payload):
            self.gap = False


def _frame(entries: Sequence[Entry]) -> Persist:
    return Persist(FrameKind.ORDERING, encode_entries(entries), TOKEN)
