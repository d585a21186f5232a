"""Applied metalog entries on their way to the ordering journal (`ORDERING` frames).

They are written many together: an entry that a crash takes is fetched again. Entries of other
storage nodes are not written at all (`indilog_storage.history`). An empty frame stands in their
place, a *gap*: recovery then knows that what follows need not follow on.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import MetalogPosition
from indilog.kernel.metalog import Entry, entries_decoded, entries_encoded
from indilog.roles.role import FrameKind, Persist

TOKEN = 0
"""The token of all `ORDERING` frames: nothing waits for them."""


class OrderingJournal:
    """What the next `ORDERING` frames hold.

    Attributes:
        pending: applied entries that no frame holds yet, consecutive.
        gap: entries after `pending` were applied that no frame will hold, and no gap is written.
    """

    __slots__ = ("gap", "pending")

    def __init__(self) -> None:
        self.pending: list[Entry] = []
        self.gap = False

    def add(self, entry: Entry) -> list[Persist]:
        """Take the next applied entry; return the frames that must come before it."""
        frames = self.flush() if self.gap else []
        assert not self.pending or entry.position == self.pending[-1].position + 1, "consecutive"
        self.pending.append(entry)
        return frames

    def skip(self) -> None:
        """Note that entries were applied that no frame will hold."""
        self.gap = True

    def flush(self) -> list[Persist]:
        """Return the frames that hold everything so far."""
        frames = [_frame(self.pending)] if self.pending else []
        if self.gap:
            frames.append(_frame(()))
        self.pending, self.gap = [], False
        return frames

    def cut_off(self, position: MetalogPosition) -> None:
        """Forget pending entries from `position` on: the primary has replaced them.

        On the disk the entries that replace them do so by their positions.
        """
        self.pending = [entry for entry in self.pending if entry.position < position]

    # --- checkpoints and recovery

    def restore(self, pending: Sequence[Entry], *, gap: bool) -> None:
        """Begin with what a checkpoint holds; it is still to be written.

        A start from the checkpoint before that one has these entries from the journal alone.
        """
        self.pending, self.gap = [*pending], gap

    def recover(self, payload: bytes) -> None:
        """Note a frame after the checkpoint: it begins with what was pending then.

        Raises:
            MalformedFrameError: it holds no entries.
        """
        self.pending = []
        if self.gap and not entries_decoded(payload):
            self.gap = False


def _frame(entries: Sequence[Entry]) -> Persist:
    return Persist(FrameKind.ORDERING, entries_encoded(entries), TOKEN)
