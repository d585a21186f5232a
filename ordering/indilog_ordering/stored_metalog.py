"""The metalog as one sequencer holds it: a base, the entries after it, and how many are durable.

The base stands for the oldest entries (decision 0030): those that every storage node has in both of
its checkpoints, so no reader needs them one by one. It moves in memory, a pack of entries at a time
(`fold`), and reaches the disk with the next checkpoint: what is replayed on an older one is the
same. A copy that lacks entries below the base of the one that it is filled from is replaced by that
base (`install`), which is a `METALOG_STATE` frame.

Damage may have taken frames, or a disk all of them. What is left then is judged so (decision 0020):

- *Entries whose positions follow on over the damage are whole*, if what replaces entries cannot
  have been in it: the primary never replaces one while it lacks none, and what replaces entries is
  of a newer incarnation.
- *A backup's copy with a hole is not to be trusted*: it forgets all its entries and is sent them
  again, so no copy with a hole is ever counted.
- *The primary's entries are all in their places.* With some behind the damage, it lacks just those
  between: it takes them from the ordering journal of a storage node in the same process (`copied`),
  or from a backup that has the entry behind the hole (`hole`). With none behind it, it is not known
  where its copy ended: it is incomplete.

A copy that is `incomplete` may lack entries that its sequencer once answered for. That is on disk
until it is over: what comes in meanwhile is written as `METALOG_FETCHED`, which says so, and a
`METALOG_STATE` with the extent of the copy says that it is whole again. Such a state counts only
where the frames before it give just that extent; then damage before it does not matter any more.
What fills a hole is `METALOG_FILLED`: the frame behind a lost one tells what was lost only if it
was written in its turn.

The primary's only grows. A backup's may be cut off (decision 0006), and that of a primary that is
incomplete: on disk that is done by the next frame, whose position lies below the end and which
replaces everything from there on.
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
    """An entry by its position and by which incarnation proposed it: that tells one metalog up to
    there from all others (`indilog_ordering.backup`).
    """

    position: MetalogPosition
    epoch: Epoch


class StoredColumns(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What a sequencer writes of its metalog in a checkpoint; the tag is the version.

    Attributes:
        base: what stands for the entries before `entries`.
        committed: what the entries add up to that are committed.
        stored, incomplete, fetches, promised, epoch_seen: as in `StoredMetalog`.
        later: entries behind a hole, encoded.
        entries: all others.
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
    """A base and entries at dense positions from there on; `stored` of all are on this disk.

    Entries are persisted in order, so what is stored is always a prefix.

    Args:
        grows: no entry is ever replaced while none is missing: this is the primary's.
        kept: committed entries that stay beside the base, about.
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
        """Entries of a growing metalog behind one that was lost; durable, ascending after recovery.
        """
        self.incomplete = False
        """Whether entries beyond those here may have been stored here once."""
        self._fetches = False
        """Whether what is written now is `METALOG_FETCHED`; not while the frame that ends it is on
        its way.
        """
        self.promised = Epoch(0)
        """The oldest incarnation of the primary that may be followed, durably."""
        self.epoch_seen = Epoch(0)
        """The newest incarnation that is known from the disk, or from what is written to it."""
        self._entries = Entries(
            page=max(1, min(PAGE, kept // 4)), unpacked_min=min(UNPACKED_MIN, kept)
        )
        self.base = Base()
        """What stands for the entries that are not here one by one."""
        self._frames = 0
        """Frames recovered and written; the next one's token."""
        self._unstored: deque[MetalogPosition | MetalogState | None] = deque()
        """What is in the frames that are not durable yet, oldest first; None: an entry that was cut
        off.
        """
        self.stored: MetalogPosition = 0
        self.committed = GrowingBase(Base())
        """What the entries add up to that are committed, as far as the primary knows; a backup does
        not. A checkpoint keeps it, so that the next life goes on from there.
        """

    def __len__(self) -> int:
        return self._entries.end

    def __getitem__(self, position: MetalogPosition) -> Entry:
        return self._entries[position]

    def page(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int | None = None
    ) -> tuple[Entry, ...]:
        """Return the entries from `start` on, below `end`: the first of them, one at least, if all
        would take more than `bytes_max`.
        """
        entries = self._entries.between(start, end)
        return entries if bytes_max is None else entries[: _fitting(entries, bytes_max)]

    def iterate(self, start: MetalogPosition, end: MetalogPosition) -> Iterator[Entry]:
        """Yield the entries from `start` on, below `end`; quicker for many than one by one."""
        return self._entries.iterate(start, end)

    def newest(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int
    ) -> tuple[Entry, ...]:
        """Return as `page` does, but the last of them."""
        if end - start == 1:
            return (self._entries[start],)
        entries = self._entries.between(start, end)
        return entries[len(entries) - _fitting(reversed(entries), bytes_max) :]

    def epoch_before(self, end: MetalogPosition) -> Epoch:
        """Return which incarnation of the primary proposed the last entry below `end`; 0: none."""
        if end == self.base.position:
            return self.base.last
        return self._entries[end - 1].epoch if end else Epoch(0)

    @property
    def extent(self) -> Extent:
        """How far the entries go, stored or not."""
        return Extent(self.epoch_before(len(self)), len(self))

    @property
    def stored_extent(self) -> Extent:
        """How far the stored ones go."""
        return Extent(self.epoch_before(self.stored), self.stored)

    def agreement(self, epoch: Epoch, length: MetalogPosition) -> MetalogPosition:
        """Return how far a copy of `length` entries, the last by incarnation `epoch`, equals this.

        The copy is a prefix of what `epoch` had (see `indilog_ordering.backup`). What survived of
        that are the entries here up to the last one that is not newer. Below the base it is not
        known: 0.
        """
        if epoch < self.base.last:
            return 0
        if epoch < self.epoch_before(len(self)):
            return min(length, self._entries.end_not_newer(epoch))
        return min(length, len(self))

    # --- recovery

    def recover(self, payload: bytes, kind: FrameKind = FrameKind.METALOG) -> None:
        """Take in the next frame that was persisted before a restart.

        Raises:
            MalformedFrameError: it is none that this version knows.
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
            if fills_hole:  # as `METALOG_FILLED`: a frame lost before it may be any
                self._keep_later(base.position)
            else:
                self.incomplete = self._doubtful = False
                self._later.clear()
            self._close_gaps()
        if state.extent is not None:
            same = state.extent == self.extent
            self.incomplete = not (same and state.whole)
            if same:  # equal extents are those of equal copies: this is what was here then
                self._doubtful = False
                self._later.clear()

    @property
    def wants_copies(self) -> bool:
        """Whether entries are known to be missing that `copied` may bring."""
        return bool(self._later)

    def copied(self, entries: Sequence[Entry]) -> None:
        """Take what is missing from entries that a node has applied: those were published."""
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
        """Take note that a frame was lost, which may have held an entry; None: of whatever kind."""
        self._doubtful = True
        if kind is FrameKind.METALOG_STATE:
            self.incomplete = True  # it may have said so, or have been a promise

    def recovered(self) -> None:
        """Recovery is over: a frame lost at the end may have held the last entry."""
        if self._grows and (self._doubtful or self.incomplete):
            self.forget_behind_hole()
        elif self._doubtful:
            self.give_up()
        self._doubtful = False
        self._fetches = self.incomplete
        self._later = dict(sorted(self._later.items()))

    # --- checkpoints

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy everything; return what encodes the copy, which may run in a thread.

        Called when all that was written is stored.
        """
        assert not self._unstored, "a checkpoint is taken between two iterations"
        entries, later = self._entries.copied(), entries_encoded([*self._later.values()])
        states = self.stored, self.incomplete, self._fetches, self.promised, self.epoch_seen
        columns = self.base, self.committed.base(), *states, later
        return lambda: _encoder.encode(StoredColumns(*columns, entries()))

    def restore(self, payload: bytes) -> None:
        """Begin with what was copied once.

        Raises:
            MalformedFrameError: it holds entries that this version does not know.
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
        """Whether nothing is missing that was stored here once, and that is durable."""
        return not (self.incomplete or self._later or self.installing)

    @property
    def hole(self) -> Anchor | None:
        """The first entry of a growing metalog behind those that it lacks; None: there is none."""
        return self.later_from(0)

    def later_from(self, start: MetalogPosition) -> Anchor | None:
        """Return the first entry behind a hole at `start` or later; None: there is none."""
        for entry in self._later.values():
            if entry.position >= start:
                return Anchor(entry.position, entry.epoch)
        return None

    def give_up(self) -> None:
        """Forget all entries: some may be missing, or be such as were replaced."""
        self._put_base(Base())
        self.stored = 0
        self.incomplete = True

    def forget_behind_hole(self) -> None:
        """Go on with what lies before the first hole, as a copy that may lack what follows."""
        self._later.clear()
        self.incomplete = self._fetches = True

    def cut_off_last_epoch(self) -> None:
        """Forget the entries of the incarnation that proposed the last one."""
        last = self.epoch_before(len(self))
        if last == self.base.last:
            self.give_up()
        else:
            self.cut_off(self._entries.end_older(last))

    def promise(self, epoch: Epoch) -> Persist:
        """Return what makes it durable that no older incarnation is followed; see `promised`."""
        extent = self.extent if self._fetches else None  # a wiped disk is no longer empty now
        return self._record(MetalogState(max(epoch, self.promised), extent, whole=False))

    def begin_to_fetch(self) -> Persist:
        """Return what makes it durable that entries may be missing behind those that are here."""
        assert self._fetches, "something may be missing"
        return self._record(MetalogState(self.promised, self.extent, whole=False))

    def complete(self) -> Persist:
        """Return what makes it durable that nothing is missing any more; see `incomplete`."""
        self._fetches = False
        return self._record(MetalogState(self.promised, self.extent, whole=True))

    def _record(self, state: MetalogState) -> Persist:
        return self._persist(FrameKind.METALOG_STATE, state_encoded(state), state)

    # --- going on

    def append(self, entry: Entry) -> Persist:
        """Add the next entry; return what makes it durable."""
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

        After a restart they are here again, unless another entry has been stored in their place.
        """
        assert self.base.position <= end <= len(self), "only what is here can be cut off"
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
        """Let the base stand for one more pack of entries, if they are all below `end` and there
        are enough behind them; tell whether it does now.
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
        """Replace the whole copy by a base; return what makes that durable.

        What lies behind a hole stays, as far as it is not below the base: the caller knows that the
        base stands for what is missing and for those below.
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
        """Whether a base is not durable yet: then nothing is."""
        return self.stored < self.base.position

    def commit(self, end: MetalogPosition) -> None:
        """Take the entries below `end` for committed."""
        start = self.committed.position
        assert start <= end <= len(self), "commits only grow, and only entries that are here"
        alone = end == start + 1
        for entry in (self._entries[start],) if alone else self.iterate(start, end):
            self.committed.apply(entry)

    def check_invariants(self) -> None:
        """Assert how base, entries and what is behind a hole lie to each other."""
        assert self._entries.start == self.base.position, "entries follow on the base"
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
    """Return how many of the entries, from the first on, fit into so many bytes; one at least."""
    count = size = 0
    for entry in entries:
        size += size_bound(entry)
        if size > bytes_max and count:
            break
        count += 1
    return count
