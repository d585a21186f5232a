"""The metalog as one sequencer holds it: all entries, and how many of them are durable here.

Damage may have taken a frame. Entries whose positions follow on over the damage are whole, if what
replaces entries cannot have been in it: the primary never replaces one, and what replaces entries
is of a newer incarnation. Otherwise a backup's copy is not to be trusted: it forgets all its
entries and is sent them again, so no copy with a hole is ever counted. The primary's entries are
all in their places, so it lacks those between them only, and takes them from the ordering journal
of a storage node that lives in the same process (`copied`).

The primary's only grows. A backup's may be cut off (decision 0006): on disk that is done by the
next frame, whose position lies below the end and which replaces everything from there on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from indilog.ids import Epoch, MetalogPosition
from indilog.metalog import Entry, entry_decoded, entry_encoded
from indilog.roles import FrameKind, Persist


class StoredMetalog:
    """Entries at dense positions from 0; `stored` of them are on this node's disk.

    Entries are persisted in order, so what is stored is always a prefix.
    """

    __slots__ = (
        "_doubtful", "_entries", "_frames", "_grows", "_later", "_unstored", "epoch_seen",
        "incomplete", "stored",
    )  # fmt: skip

    def __init__(self, *, grows: bool = False) -> None:
        self._grows = grows
        """Whether no entry is ever replaced: this is the primary's."""
        self._doubtful = False
        """Whether a frame was lost after the last one that was recovered."""
        self._later: dict[MetalogPosition, Entry] = {}
        """Entries of a growing metalog behind one that was lost."""
        self.incomplete = False
        """Whether entries were lost for certain, or possibly, so that all were forgotten."""
        self.epoch_seen = Epoch(0)
        """The newest incarnation that proposed an entry found on disk."""
        self._entries: list[Entry] = []
        self._frames = 0
        """Frames recovered and written; the next one's token."""
        self._unstored: deque[MetalogPosition | None] = deque()
        """The entries of the frames that are not durable yet, oldest first; None: cut off."""
        self.stored: MetalogPosition = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: MetalogPosition) -> Entry:
        return self._entries[position]

    def page(self, start: MetalogPosition, end: MetalogPosition) -> tuple[Entry, ...]:
        """Return the entries from `start` on, below `end`."""
        return tuple(self._entries[start:end])

    def epoch_before(self, end: MetalogPosition) -> Epoch:
        """Return which incarnation of the primary proposed the last entry below `end`; 0: none."""
        return self._entries[end - 1].epoch if end else Epoch(0)

    def agreement(self, epoch: Epoch, length: MetalogPosition) -> MetalogPosition:
        """Return how far a copy of `length` entries, the last by incarnation `epoch`, equals this.

        The copy is a prefix of what `epoch` had (see `ordering.backup`). What survived of that are
        the entries here up to the last one that is not newer.
        """
        if epoch < self.epoch_before(len(self._entries)):
            survived = bisect_right(self._entries, epoch, key=lambda entry: entry.epoch)
            return min(length, survived)
        return min(length, len(self._entries))

    def recover(self, payload: bytes) -> None:
        """Take in the next entry that was persisted before a restart.

        Raises:
            MalformedFrameError: it is none that this version knows.
        """
        entry = entry_decoded(payload)
        self._frames += 1
        self.epoch_seen = max(self.epoch_seen, entry.epoch)
        length = len(self._entries)
        if self._grows and entry.position >= length and (self._doubtful or self._later):
            self._later[entry.position] = entry
            self._doubtful = False
            self._close_gaps()
            return
        follows = entry.position == length
        same = not length or entry.epoch == self.epoch_before(length)
        if self._doubtful and not (follows and same):
            self.give_up()
            follows = entry.position == 0
        self._doubtful = False
        if self.incomplete and entry.position > len(self._entries):
            return
        assert follows or entry.position <= length, "entries are persisted without gaps"
        del self._entries[entry.position :]
        self._entries.append(entry)
        self.stored = len(self._entries)

    @property
    def wants_copies(self) -> bool:
        """Whether entries are known to be missing that `copied` may bring."""
        return bool(self._later)

    def copied(self, entries: Sequence[Entry]) -> None:
        """Take what is missing from entries that somebody has applied: those were published."""
        for entry in entries:
            if self._later and entry.position == len(self._entries):
                self._later[entry.position] = entry
                self._close_gaps()

    def _close_gaps(self) -> None:
        while (entry := self._later.pop(len(self._entries), None)) is not None:
            self._entries.append(entry)
        self.stored = len(self._entries)

    def doubt(self) -> None:
        """Take note that a frame was lost, which may have held an entry."""
        self._doubtful = True

    def recovered(self) -> None:
        """Recovery is over: a frame lost at the end may have held the last entry."""
        if self._doubtful or self._later:
            self.give_up()
            self._doubtful = False
            self._later.clear()

    def give_up(self) -> None:
        """Forget all entries: some may be missing, or be such as were replaced."""
        self._entries.clear()
        self.stored = 0
        self.incomplete = True

    def append(self, entry: Entry) -> Persist:
        """Add the next entry; return what makes it durable."""
        assert entry.position == len(self._entries), "entries are appended in order, without gaps"
        self._entries.append(entry)
        self._unstored.append(entry.position)
        self._frames += 1
        return Persist(FrameKind.METALOG, entry_encoded(entry), self._frames - 1)

    def cut_off(self, end: MetalogPosition) -> None:
        """Forget the entries from `end` on.

        After a restart they are here again, unless another entry has been stored in their place.
        """
        assert 0 <= end <= len(self._entries), "only what is here can be cut off"
        del self._entries[end:]
        self.stored = min(self.stored, end)
        self._unstored = deque(
            position if position is not None and position < end else None
            for position in self._unstored
        )

    def on_persisted(self, token: int) -> None:
        """Note that the frame with this token is durable."""
        assert self._unstored, "only an entry that was appended is made durable"
        first = self._frames - len(self._unstored)
        assert token == first, "frames are made durable in the order they were written"
        position = self._unstored.popleft()
        if position is not None:
            assert position == self.stored, "what is stored is a prefix"
            self.stored = position + 1
