"""The metalog as one sequencer stores it: a base, the entries after it, and how many of them are
durable.

The base replaces the oldest entries (decision 0030). Every storage node has these in both of its
checkpoints, so no reader needs them one by one. The base advances in memory, one pack of entries at
a time (`fold`), and reaches the disk with the next checkpoint. Replay on an older base gives the
same metalog. If a copy lacks entries that its source has only as a base, that base replaces the
whole copy (`install`). A `METALOG_STATE` frame holds it.

Damage may destroy frames, and a wiped disk loses all of them. Recovery judges the rest by three
rules (decision 0020):

- *Entries with consecutive positions before and after the damage are complete*, unless the damaged
  frames may have replaced entries. A primary that lacks no entry never replaces one. In a backup,
  entries that replace others are of a newer incarnation.
- *A backup does not trust a copy with a hole.* It forgets all its entries, and the primary sends
  them again. So a copy with a hole is never counted.
- *Each entry of the primary has its final position.* If entries follow the damage, only those
  between are missing. They come from the ordering journal of a storage node in the same process
  (`copied`), or from a backup that has the first entry after the hole (`hole`). If none follow, the
  end of the copy is unknown, and the copy is *incomplete*.

An `incomplete` copy may lack entries that its sequencer once acknowledged. The disk states this as
long as it holds: entries written meanwhile are `METALOG_FETCHED` frames. A `METALOG_STATE` frame
with the extent of the copy states that the copy is whole again. It counts only if the frames before
it give exactly that extent. Earlier damage then no longer matters. Entries that fill a hole are out
of order, so they are `METALOG_FILLED` frames. The position of such an entry does not show what a
lost frame before it held.

The primary's copy only grows. A backup's copy may be cut off (decision 0006), and so may that of an
incomplete primary. On disk the next frame does this: its position lies below the end, and it
replaces all entries from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import (
    Base,
    Entry,
    GrowingBase,
    entries_decoded,
    entries_encoded,
    entry_decoded,
    entry_encoded,
    size_bound,
)
from indilog.roles.role import FrameKind, Persist
from indilog_ordering.entries import PAGE, UNPACKED_MIN, Entries, PackedEntries
from indilog_ordering.metalog_state import MetalogState, state_decoded, state_encoded


class Anchor(NamedTuple):
    """An entry, named by its position and the incarnation that proposed it. Copies that have it are
    equal up to it (`indilog_ordering.backup`).
    """

    position: MetalogPosition
    epoch: Epoch


class StoredColumns(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The metalog in the checkpoint of a sequencer; the tag is the version of the format.

    Attributes:
        base: what replaces the entries before `entries`.
        committed: the base that all committed entries add up to.
        stored, incomplete, fetches, promised, epoch_seen: as in `StoredMetalog`.
        later: the entries after a hole, encoded.
        entries: all other entries.
    """

    base: Base
    committed: Base
    stored: MetalogPosition
    incomplete: bool
    fetches: bool
    promised: Epoch
    epoch_seen: Epoch
    later: bytes
    entries: PackedEntries


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredColumns)


class StoredMetalog:
    """A base, and entries at dense positions from its end on. The first `stored` positions are
    durable.

    Entries are persisted in order, so the durable ones are always a prefix.

    Args:
        grows: whether this is the primary's copy: while it lacks no entry, none is replaced.
        kept: about how many committed entries are not folded into the base.
    """

    __slots__ = (
        "_doubtful", "_entries", "_fetches", "_frames", "_grows", "_kept", "_later", "_unstored",
        "base", "committed", "epoch_seen", "incomplete", "promised", "stored",
    )  # fmt: skip

    def __init__(self, *, grows: bool = False, kept: int = UNPACKED_MIN) -> None:
        self._grows = grows
        self._kept = kept
        self._doubtful = False
        """Whether a frame was lost after the last one that was recovered."""
        self._later: dict[MetalogPosition, Entry] = {}
        """Durable entries after a hole, only of a growing metalog; ascending after recovery."""
        self.incomplete = False
        """Whether entries after those here may have been stored here once."""
        self._fetches = False
        """Whether entries are written as `METALOG_FETCHED` now; False once the frame that ends this
        was written.
        """
        self.promised = Epoch(0)
        """The oldest incarnation of the primary that may be followed, durably."""
        self.epoch_seen = Epoch(0)
        """The newest incarnation that any frame names, durable or being written."""
        self._entries = Entries(
            page=max(1, min(PAGE, kept // 4)), unpacked_min=min(UNPACKED_MIN, kept)
        )
        self.base = Base()
        """What replaces the oldest entries."""
        self._frames = 0
        """Number of frames recovered and written; the token of the next one."""
        self._unstored: deque[MetalogPosition | MetalogState | None] = deque()
        """Contents of the frames that are not durable yet, oldest first; None: an entry that was
        cut off.
        """
        self.stored: MetalogPosition = 0
        self.committed = GrowingBase(Base())
        """What the entries add up to that the primary knows to be committed; a backup does not use
        it. It is part of a checkpoint, so the next incarnation continues from it.
        """

    def __len__(self) -> int:
        return self._entries.end

    def __getitem__(self, position: MetalogPosition) -> Entry:
        return self._entries[position]

    def page(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int | None = None
    ) -> tuple[Entry, ...]:
        """Return the entries of [start, end), or the first of them that fit into `bytes_max`; at
        least one.
        """
        entries = self._entries.between(start, end)
        return entries if bytes_max is None else entries[: _fitting(entries, bytes_max)]

    def iterate(self, start: MetalogPosition, end: MetalogPosition) -> Iterator[Entry]:
        """Yield the entries of [start, end); faster than single accesses."""
        return self._entries.iterate(start, end)

    def newest(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int
    ) -> tuple[Entry, ...]:
        """Return the entries of [start, end), or the last of them that fit into `bytes_max`; at
        least one.
        """
        if end - start == 1:
            return (self._entries[start],)
        entries = self._entries.between(start, end)
        return entries[len(entries) - _fitting(reversed(entries), bytes_max) :]

    def epoch_before(self, end: MetalogPosition) -> Epoch:
        """Return the incarnation of the primary that proposed the last entry below `end`; 0: no
        entry.
        """
        if end == self.base.position:
            return self.base.last
        return self._entries[end - 1].epoch if end else Epoch(0)

    @property
    def extent(self) -> Extent:
        """The extent of all entries, durable or not."""
        return Extent(self.epoch_before(len(self)), len(self))

    @property
    def stored_extent(self) -> Extent:
        """The extent of the durable entries."""
        return Extent(self.epoch_before(self.stored), self.stored)

    def agreement(self, epoch: Epoch, length: MetalogPosition) -> MetalogPosition:
        """Return how many entries this copy has in common with another one, from the first entry
        on.

        The other copy has `length` entries, the last one proposed by incarnation `epoch`. It is a
        prefix of what that incarnation had (`indilog_ordering.backup`). The entries here up to the
        last one that is not newer survived of that. If the base replaces these entries, the number
        is unknown, and 0 is returned.
        """
        if epoch < self.base.last:
            return 0
        if epoch < self.epoch_before(len(self)):
            return min(length, self._entries.end_not_newer(epoch))
        return min(length, len(self))

    # --- recovery

    def recover(self, payload: bytes, kind: FrameKind = FrameKind.METALOG) -> None:
        """Replay the next frame that was persisted before a restart.

        Raises:
            MalformedFrameError: this release cannot decode the frame.
        """
        self._frames += 1
        if kind is FrameKind.METALOG_STATE:
            self._recover_state(state_decoded(payload))
            return
        entry = entry_decoded(payload)
        self.epoch_seen = max(self.epoch_seen, entry.epoch)
        if kind is FrameKind.METALOG_FETCHED:
            self._later.clear()
            self.incomplete = True
        length = len(self)
        in_place = self._grows and not self.incomplete and entry.position >= length
        if in_place and (self._doubtful or self._later):
            self._later[entry.position] = entry
            self._doubtful = self._doubtful and kind is FrameKind.METALOG_FILLED
            self._close_gaps()
            return
        follows = entry.position == length
        same = not length or entry.epoch == self.epoch_before(length)
        if (self._doubtful and not (follows and same)) or entry.position < self.base.position:
            self.give_up()
            follows = entry.position == 0
        self._doubtful = False
        if self.incomplete and entry.position > len(self):
            return
        assert follows or entry.position <= length, "entries are persisted without gaps"
        if entry.position < length:
            self._entries.cut_off(entry.position)
        self._entries.append(entry)
        self.stored = len(self)

    def _recover_state(self, state: MetalogState) -> None:
        self.promised = max(self.promised, state.promised)
        self.epoch_seen = max(self.epoch_seen, state.promised)
        if (base := state.base) is not None:
            fills_hole = self._grows and state.extent is None
            self._put_base(base)
            self.stored = base.position
            self.epoch_seen = max(self.epoch_seen, base.last)
            if fills_hole:  # as `METALOG_FILLED`: a lost frame before it may have held any entry
                self._keep_later(base.position)
            else:
                self.incomplete = self._doubtful = False
                self._later.clear()
            self._close_gaps()
        if state.extent is not None:
            same = state.extent == self.extent
            self.incomplete = not (same and state.whole)
            if same:  # equal extents mean equal copies: this is the copy as it was then
                self._doubtful = False
                self._later.clear()

    @property
    def wants_copies(self) -> bool:
        """Whether there is a hole that `copied` may fill."""
        return bool(self._later)

    def copied(self, entries: Sequence[Entry]) -> None:
        """Fill a hole from entries that a storage node has applied: these were published."""
        for entry in entries:
            if self._later and entry.position == len(self):
                self._later[entry.position] = entry
                self._close_gaps()

    def _close_gaps(self) -> None:
        while (entry := self._later.pop(len(self), None)) is not None:
            self._entries.append(entry)
        self.stored = len(self)

    def _keep_later(self, start: MetalogPosition) -> None:
        self._later = {at: entry for at, entry in self._later.items() if at >= start}

    def doubt(self, kind: FrameKind | None = None) -> None:
        """Note that a frame was lost, which may have held an entry; `kind` None: its kind is
        unknown.
        """
        self._doubtful = True
        if kind is FrameKind.METALOG_STATE:
            self.incomplete = True  # it may have stated this, or a promise

    def recovered(self) -> None:
        """End the recovery. A frame that was lost at the end may have held the last entry."""
        if self._grows and (self._doubtful or self.incomplete):
            self.forget_behind_hole()
        elif self._doubtful:
            self.give_up()
        self._doubtful = False
        self._fetches = self.incomplete
        self._later = dict(sorted(self._later.items()))

    # --- checkpoints

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state; the returned function encodes the copy and may run in any thread.

        Called when all written frames are durable.
        """
        assert not self._unstored, "a checkpoint is taken between two iterations"
        entries, later = self._entries.copied(), entries_encoded([*self._later.values()])
        states = self.stored, self.incomplete, self._fetches, self.promised, self.epoch_seen
        columns = self.base, self.committed.base(), *states, later
        return lambda: _encoder.encode(StoredColumns(*columns, entries()))

    def restore(self, payload: bytes) -> None:
        """Start from a checkpoint.

        Raises:
            MalformedFrameError: the checkpoint is of a version that this release does not know.
        """
        try:
            columns = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise MalformedFrameError(f"not the checkpoint of a sequencer: {error}") from error
        self.base, self.committed = columns.base, GrowingBase(columns.committed)
        self.stored, self.incomplete = columns.stored, columns.incomplete
        self._fetches = columns.fetches
        self.promised, self.epoch_seen = columns.promised, columns.epoch_seen
        self._later = {entry.position: entry for entry in entries_decoded(columns.later)}
        self._entries.restore(columns.entries)

    # --- what is missing

    @property
    def whole(self) -> bool:
        """Whether the copy has all entries that it ever had, durably."""
        return not (self.incomplete or self._later or self.installing)

    @property
    def hole(self) -> Anchor | None:
        """The first entry after a hole of a growing metalog; None: there is no hole."""
        return self.later_from(0)

    def later_from(self, start: MetalogPosition) -> Anchor | None:
        """Return the first entry at `start` or later that follows a hole; None: there is none."""
        for entry in self._later.values():
            if entry.position >= start:
                return Anchor(entry.position, entry.epoch)
        return None

    def give_up(self) -> None:
        """Forget all entries: some may be missing, or may have been replaced."""
        self._put_base(Base())
        self.stored = 0
        self.incomplete = True

    def forget_behind_hole(self) -> None:
        """Forget the entries after the first hole; the copy is then incomplete."""
        self._later.clear()
        self.incomplete = self._fetches = True

    def cut_off_last_epoch(self) -> None:
        """Forget all entries that the incarnation of the last entry proposed."""
        last = self.epoch_before(len(self))
        if last == self.base.last:
            self.give_up()
        else:
            self.cut_off(self._entries.end_older(last))

    def promise(self, epoch: Epoch) -> Persist:
        """Return the frame of a promise to follow no incarnation older than `epoch`; see
        `promised`.
        """
        extent = self.extent if self._fetches else None  # a wiped disk is not empty any more
        return self._record(MetalogState(max(epoch, self.promised), extent, whole=False))

    def begin_to_fetch(self) -> Persist:
        """Return the frame that marks the copy as incomplete: entries may be missing at its end."""
        assert self._fetches, "something may be missing"
        return self._record(MetalogState(self.promised, self.extent, whole=False))

    def complete(self) -> Persist:
        """Return the frame that marks the copy as whole; see `incomplete`."""
        self._fetches = False
        return self._record(MetalogState(self.promised, self.extent, whole=True))

    def _record(self, state: MetalogState) -> Persist:
        return self._persist(FrameKind.METALOG_STATE, state_encoded(state), state)

    # --- new entries

    def append(self, entry: Entry) -> Persist:
        """Add the next entry; return its frame."""
        assert entry.position == len(self), "entries are appended in order, without gaps"
        self._entries.append(entry)
        self.epoch_seen = max(self.epoch_seen, entry.epoch)
        kind = FrameKind.METALOG_FILLED if self._later else FrameKind.METALOG
        if self._fetches:
            kind = FrameKind.METALOG_FETCHED
        return self._persist(kind, entry_encoded(entry), entry.position)

    def _persist(
        self, kind: FrameKind, payload: bytes, content: MetalogPosition | MetalogState
    ) -> Persist:
        self._unstored.append(content)
        self._frames += 1
        return Persist(kind, payload, self._frames - 1)

    def cut_off(self, end: MetalogPosition) -> None:
        """Forget the entries from `end` on.

        They stay on disk until the next entry is written. A restart before that restores them.
        """
        assert self.base.position <= end <= len(self), "only existing entries can be cut off"
        self._entries.cut_off(end)
        self.stored = min(self.stored, end)
        if self.committed.position > end:
            self.committed = GrowingBase(self.base)
        self._unstored = deque(
            None if isinstance(content, int) and content >= end else content
            for content in self._unstored
        )

    # --- the base

    def fold(self, end: MetalogPosition) -> bool:
        """Move the first pack of entries into the base; return whether that was possible. All its
        entries must be durable and below `end`, and enough entries must follow.
        """
        pack_end = self._entries.first_pack_end
        end = min(end, self.stored, len(self) - self._kept)
        if pack_end is None or pack_end > end:
            return False
        self.base = self.base.with_entries(self._entries.between(self.base.position, pack_end))
        self._entries.drop_pack()
        if self.committed.position < pack_end:
            self.committed = GrowingBase(self.base)
        return True

    def install(self, base: Base) -> Persist:
        """Replace the whole copy by a base; return the frame with the base.

        Entries after a hole stay if they are not below the base. The caller knows that the base
        replaces the missing entries and all entries below it.
        """
        assert not (self._later and self.incomplete), "what is missing is known, or it is not"
        self._put_base(base)
        self._keep_later(base.position)
        self.stored = 0
        self.epoch_seen = max(self.epoch_seen, base.last)
        self._unstored = deque(
            None if isinstance(content, int) else content for content in self._unstored
        )
        extent = Extent(base.last, base.position) if self.incomplete else None
        self._fetches = self.incomplete
        return self._record(MetalogState(self.promised, extent, whole=False, base=base))

    def _put_base(self, base: Base) -> None:
        self.base, self.committed = base, GrowingBase(base)
        self._entries.restart(base.position)

    @property
    def installing(self) -> bool:
        """Whether a base was installed that is not durable yet; until then nothing counts as
        durable.
        """
        return self.stored < self.base.position

    def commit(self, end: MetalogPosition) -> None:
        """Note that the entries below `end` are committed."""
        start = self.committed.position
        assert start <= end <= len(self), "commits only grow, up to the last entry"
        alone = end == start + 1
        for entry in (self._entries[start],) if alone else self.iterate(start, end):
            self.committed.apply(entry)

    def check_invariants(self) -> None:
        """Assert the order of base, durable, committed and later entries."""
        assert self._entries.start == self.base.position, "entries begin where the base ends"
        assert self.stored <= len(self)
        assert self.base.position <= self.committed.position <= len(self)
        assert self.promised <= self.epoch_seen
        assert not (self._later and self.incomplete), "what is missing is known, or it is not"
        assert self._grows or not self._later, "a backup with a hole forgets its entries"

    def on_persisted(self, token: int) -> None:
        """Note that the frame with this token is durable."""
        assert self._unstored, "only what was written is made durable"
        first = self._frames - len(self._unstored)
        assert token == first, "frames are made durable in the order they were written"
        content = self._unstored.popleft()
        if isinstance(content, MetalogState):
            self.promised = max(self.promised, content.promised)
            self.epoch_seen = max(self.epoch_seen, content.promised)
            self.incomplete = self.incomplete and not content.whole
            if content.base is not None and content.base == self.base:
                self.stored = max(self.stored, self.base.position)
        elif content is not None:
            assert content == self.stored, "what is stored is a prefix"
            self.stored = content + 1
        if self._later and self.stored == len(self):
            self._close_gaps()


def _fitting(entries: Iterable[Entry], bytes_max: int) -> int:
    """Return how many of the first entries fit into `bytes_max` bytes; at least 1."""
    count = size = 0
    for entry in entries:
        size += size_bound(entry)
        if size > bytes_max and count:
            break
        count += 1
    return count
