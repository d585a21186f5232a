"""The metalog as one sequencer holds it: all entries, and how many of them are durable here."""

from __future__ import annotations

from indilog.ids import MetalogPosition
from indilog.metalog import Entry, entry_decoded, entry_encoded
from indilog.roles import FrameKind, Persist


class StoredMetalog:
    """Entries at dense positions from 0; `stored` of them are on this node's disk.

    Entries are persisted in order, so what is stored is always a prefix. A frame's token is its
    entry's position.
    """

    __slots__ = ("_entries", "stored")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.stored: MetalogPosition = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: MetalogPosition) -> Entry:
        return self._entries[position]

    def page(self, start: MetalogPosition, end: MetalogPosition) -> tuple[Entry, ...]:
        """Return the entries from `start` on, below `end`."""
        return tuple(self._entries[start:end])

    def recover(self, payload: bytes) -> None:
        """Take in the next entry that was persisted before a restart.

        Raises:
            MalformedFrameError: it is none that this version knows.
        """
        entry = entry_decoded(payload)
        assert entry.position == len(self._entries), "entries are persisted in order, without gaps"
        self._entries.append(entry)
        self.stored += 1

    def append(self, entry: Entry) -> Persist:
        """Add the next entry; return what makes it durable."""
        assert entry.position == len(self._entries), "entries are appended in order, without gaps"
        self._entries.append(entry)
        return Persist(FrameKind.METALOG, entry_encoded(entry), entry.position)

    def on_persisted(self, token: int) -> None:
        """Note that the entry at `token` is durable."""
        assert token == self.stored, "frames are made durable in the order they were written"
        assert token < len(self._entries), "only an entry that was appended is made durable"
        self.stored += 1
