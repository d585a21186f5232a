"""The metalog as one sequencer stores it: a base, the entries after it, and how many of them are
durable.

The base replaces the oldest entries (decision 0030). Every running storage node has these entries
in both of its checkpoints, so no reader needs them one by one. The base advances in memory, one
pack of entries at a time (`fold`), and reaches the disk with the next checkpoint. Replay on an
older base gives the same metalog. A copy may lack entries that its source has only as a base. The
base of the source then replaces the whole copy (`install`), and a `METALOG_STATE` frame holds this
base.

A copy may be cut off. On disk, the next entry cuts off the copy: the position of this entry lies
below the end of the copy, and the entry replaces all entries from there on.

A copy that ends with an entry of term t is a prefix of the copy that the primary of term t had
(`indilog_ordering.consensus`). So an entry's term and position name the whole copy up to that
entry.

Damage may destroy frames, and a wiped disk loses all of them. Recovery judges the rest by these
rules:

- *An entry after the damage proves that no entry is missing* if the entry before its position has
  the same term. When the entry was written, the copy up to it equalled the copy of the primary of
  this term.
- *A `METALOG_STATE` frame resolves all damage before it* if the copy has exactly the extent that
  the frame names, because equal extents mean equal copies. The frame also holds the newest promise,
  and whether the node was a learner.
- *Otherwise the node is a learner*: it keeps the entries before the damage and fetches the others
  (`indilog_ordering.consensus`). It is also a learner if the lost frame may have held a promise.
- *A sole sequencer* never replaces an entry and promises nothing. So each entry on its disk has its
  final position. If entries follow the damage, only the entries between are missing. The ordering
  journal of a storage node in the same process can supply them (`copied`). If no storage node
  supplies them, or if no entries follow the damage, the order of the log is lost.

`Sequencer` creates and recovers the one `StoredMetalog`. `Member` and `Leader` append to it, and
`Primary` reads its committed state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import (
    Base,
    Entry,
    GrowingBase,
    NewView,
    decode_entry,
    encode_entry,
    size_bound,
)
from indilog.kernel.view import View
from indilog.roles.role import FrameKind, Persist
from indilog_ordering.entries import PAGE, UNPACKED_MIN, Entries, PackedEntries
from indilog_ordering.metalog_state import MetalogState, decode_state, encode_state


class StoredColumns(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The metalog in the checkpoint of a sequencer; the tag is the version of the format.

    Attributes:
        base: the base that replaces the entries before `entries`.
        committed: the base that summarises all committed entries.
        stored, promised, learner: as in `StoredMetalog`.
        entries: all other entries.
        views: the positions of the entries that install a view; None: not known.
    """

    base: Base
    committed: Base
    stored: MetalogPosition
    promised: Epoch
    learner: bool
    entries: PackedEntries
    views: tuple[MetalogPosition, ...] | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredColumns)


class StoredMetalog:
    """A base, and entries at dense positions from its end on. The first `stored` positions are
    durable.

    Entries are persisted in order, so the durable entries are always a prefix.

    Args:
        sole: whether there is no other sequencer.
        kept: about how many committed entries are not folded into the base.

    Attributes:
        base: the base that replaces the oldest entries.
        committed: the state after all entries that this node knows to be durably committed. A
            primary advances it by `commit`; at a backup it advances only with the base. It is part
            of a checkpoint, so a later primary here continues from it.
        stored: number of durable entries.
        promised: the durable promise: primaries of a term below this are not followed.
        learner: whether the node is durably a learner: its copy may lack entries or promises that
            it once had.
    """

    __slots__ = (
        "_broken", "_doubtful", "_entries", "_frames", "_kept", "_later", "_promise_lost", "_sole",
        "_unstored", "_views", "base", "committed", "learner", "promised", "stored", "written",
    )  # fmt: skip

    def __init__(self, *, sole: bool = False, kept: int = UNPACKED_MIN) -> None:
        self._sole = sole
        self._kept = kept
        self._doubtful = False
        """Whether a frame after the last recovered one was lost."""
        self._broken = False
        """Whether a recovered frame did not continue the copy; later entries are then skipped."""
        self._promise_lost = False
        """Whether a lost frame may have held a promise that no later frame holds."""
        self._later: dict[MetalogPosition, Entry] = {}
        """For a sole sequencer: entries that recovery found after a hole."""
        self.learner = False
        self.promised = Epoch(0)
        self.written = MetalogState(Epoch(0), learner=False, extent=Extent(Epoch(0), 0))
        """The state that was written last, durable or not."""
        self._entries = Entries(
            page=max(1, min(PAGE, kept // 4)), unpacked_min=min(UNPACKED_MIN, kept)
        )
        self.base = Base()
        self._views: list[tuple[MetalogPosition, View]] = []
        """The views that entries after the base install, with their positions."""
        self._frames = 0
        """Number of frames recovered and written; this is the token of the next frame."""
        self._unstored: deque[MetalogPosition | MetalogState | None] = deque()
        """Contents of the frames that are not durable yet, oldest first; None: an entry that was
        cut off.
        """
        self.stored: MetalogPosition = 0
        self.committed = GrowingBase(Base())

    def __len__(self) -> int:
        return self._entries.end

    def __getitem__(self, position: MetalogPosition) -> Entry:
        return self._entries[position]

    def page(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int | None = None
    ) -> tuple[Entry, ...]:
        """Return the first entries of [start, end) that fit into `bytes_max`; at least one. Without
        `bytes_max`, return all.
        """
        entries = self._entries.between(start, end)
        return entries if bytes_max is None else entries[: _fitting(entries, bytes_max)]

    def iterate(self, start: MetalogPosition, end: MetalogPosition) -> Iterator[Entry]:
        """Yield the entries of [start, end); faster than single accesses."""
        return self._entries.iterate(start, end)

    def newest(
        self, start: MetalogPosition, end: MetalogPosition, bytes_max: int
    ) -> tuple[Entry, ...]:
        """Return the last entries of [start, end) that fit into `bytes_max`; at least one."""
        if end - start == 1:
            return (self._entries[start],)
        entries = self._entries.between(start, end)
        return entries[len(entries) - _fitting(reversed(entries), bytes_max) :]

    def epoch_before(self, end: MetalogPosition) -> Epoch:
        """Return the term of the last entry below `end`; 0: there is no entry."""
        if end == self.base.position:
            return self.base.last
        return self._entries[end - 1].epoch if end else Epoch(0)

    @property
    def view(self) -> View | None:
        """The newest view that the entries here install, committed or not; None: there is none."""
        return self._views[-1][1] if self._views else self.base.view

    @property
    def view_end(self) -> MetalogPosition:
        """Number of entries up to and including the entry that installs `view`. If the base
        contains this entry, an upper bound: the number of entries in the base.
        """
        return self._views[-1][0] + 1 if self._views else self.base.position

    @property
    def extent(self) -> Extent:
        """The extent of all entries, durable or not."""
        return Extent(self.epoch_before(len(self)), len(self))

    @property
    def stored_extent(self) -> Extent:
        """The extent of the durable entries."""
        return Extent(self.epoch_before(self.stored), self.stored)

    def agreement(self, last: Epoch, length: MetalogPosition) -> MetalogPosition:
        """Return an upper bound of the common prefix of this copy and another copy, in entries.

        The other copy has `length` entries, the last one of term `last`. The bound is exact if the
        other copy has only committed entries. It is 0 if the base here replaces the entries that
        would have to be compared.
        """
        if last < self.base.last:
            return 0
        if last < self.epoch_before(len(self)):
            return min(length, self._entries.end_not_newer(last))
        return min(length, len(self))

    def fits(self, start: MetalogPosition, previous: Epoch) -> bool:
        """Whether the entry before `start` is of term `previous`. All copies with such an entry are
        equal up to `start`.
        """
        return self.base.position <= start <= len(self) and self.epoch_before(start) == previous

    def common(self, start: MetalogPosition, previous: Epoch) -> Extent:
        """Return the largest extent that this copy can share with a copy whose entry before `start`
        is of term `previous`.
        """
        end = max(self.base.position, min(start, len(self)))
        while end > self.base.position and self.epoch_before(end) > previous:
            end = self._entries.end_older(self.epoch_before(end))
        return Extent(self.epoch_before(end), end)

    # --- recovery

    def recover(self, payload: bytes, kind: FrameKind = FrameKind.METALOG) -> None:
        """Replay the next frame that was persisted before a restart.

        Raises:
            MalformedFrameError: this release cannot decode the frame.
        """
        self._frames += 1
        if kind is FrameKind.METALOG_STATE:
            self._recover_state(decode_state(payload))
            return
        entry = decode_entry(payload)
        position = entry.position
        if self._sole and (self._later or position > len(self)):
            self._later[position] = entry
            self._doubtful = False
            self._close_gaps()
            return
        if self._doubtful and not self._proves(entry):
            self._broken = True
        if self._broken:
            return
        self._doubtful = False
        assert self.base.position <= position <= len(self), "entries are persisted without gaps"
        if position < len(self):
            self._cut_off(position)
        self._add(entry)
        self.stored = len(self)

    def _proves(self, entry: Entry) -> bool:
        """Whether this entry proves that no entry before it is missing (see the module)."""
        position = entry.position
        if self._sole:
            return position == len(self)
        return position == 0 == self.base.position or self.fits(position, entry.epoch)

    def _recover_state(self, state: MetalogState) -> None:
        self.promised = max(self.promised, state.promised)
        self._promise_lost = False
        if state.base is not None:
            self._put_base(state.base)
            self.stored = state.base.position
        if state.extent == self.extent:
            self.learner = state.learner
            self._doubtful = self._broken = False
        else:
            self._broken = True
        self._note_written()

    def _note_written(self) -> None:
        self.written = MetalogState(self.promised, self.learner, self.extent)

    @property
    def wants_copies(self) -> bool:
        """Whether there is a hole that `copied` may fill."""
        return bool(self._later)

    def copied(self, entries: Sequence[Entry]) -> None:
        """Fill a hole from entries that a storage node has applied. Such entries were published."""
        for entry in entries:
            if self._later and entry.position == len(self):
                self._later[entry.position] = entry
                self._close_gaps()

    def _close_gaps(self) -> None:
        while (entry := self._later.pop(len(self), None)) is not None:
            self._add(entry)
        self.stored = len(self)

    def doubt(self, kind: FrameKind | None = None) -> None:
        """Note the loss of a frame that may have held an entry; `kind` None: its kind is
        unknown.
        """
        self._doubtful = True
        if kind is not FrameKind.METALOG and not self._sole:
            self._promise_lost = True

    def recovered(self) -> None:
        """End the recovery. Unresolved damage makes the node a learner."""
        if self._doubtful or self._broken or self._promise_lost or self._later:
            self.learner = True
        self._doubtful = self._broken = self._promise_lost = False
        self._later.clear()
        self._note_written()

    # --- checkpoints

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state; the returned function encodes the copy and may run in any thread.

        The caller makes sure that all written frames are durable.
        """
        assert not self._unstored, "a checkpoint is taken between two iterations"
        entries = self._entries.copied()
        states = self.stored, self.promised, self.learner
        columns = self.base, self.committed.base(), *states
        views = tuple(position for position, _ in self._views)
        return lambda: _encoder.encode(StoredColumns(*columns, entries(), views))

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
        self.stored, self.promised = columns.stored, columns.promised
        self.learner = columns.learner
        self._entries.restore(columns.entries)
        self._restore_views(columns.views)
        self._note_written()

    def _restore_views(self, positions: Iterable[MetalogPosition] | None) -> None:
        if positions is None:  # an earlier release wrote the checkpoint
            positions = range(self.base.position, len(self))
        entries = ((position, self._entries[position]) for position in positions)
        self._views = [(at, entry.following) for at, entry in entries if isinstance(entry, NewView)]

    # --- the state

    def promise(self, term: Epoch) -> Persist:
        """Return the frame of a promise to follow no primary of a term below `term`."""
        assert term >= self.written.promised, "a promise is never taken back"
        return self._record(MetalogState(term, self.written.learner, self.extent))

    def mark(self, *, learner: bool) -> Persist:
        """Return the frame that marks this node as a learner, or as a voter again."""
        return self._record(MetalogState(self.written.promised, learner, self.extent))

    def _record(self, state: MetalogState) -> Persist:
        self.written = state
        return self._persist(FrameKind.METALOG_STATE, encode_state(state), state)

    # --- new entries

    def append(self, entry: Entry) -> Persist:
        """Add the next entry; return its frame."""
        assert entry.position == len(self), "entries are appended in order, without gaps"
        self._add(entry)
        return self._persist(FrameKind.METALOG, encode_entry(entry), entry.position)

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if isinstance(entry, NewView):
            self._views.append((entry.position, entry.following))

    def _persist(
        self, kind: FrameKind, payload: bytes, content: MetalogPosition | MetalogState
    ) -> Persist:
        self._unstored.append(content)
        self._frames += 1
        return Persist(kind, payload, self._frames - 1)

    def cut_off(self, end: MetalogPosition) -> None:
        """Remove the entries from `end` on.

        The entries stay on disk until the next entry is written. A restart before then restores
        them.
        """
        assert self.base.position <= end <= len(self), "only existing entries can be cut off"
        self._cut_off(end)
        self.stored = min(self.stored, end)
        if self.committed.position > end:
            self.committed = GrowingBase(self.base)
        self._unstored = deque(
            None if isinstance(content, int) and content >= end else content
            for content in self._unstored
        )

    def _cut_off(self, end: MetalogPosition) -> None:
        self._entries.cut_off(end)
        while self._views and self._views[-1][0] >= end:
            self._views.pop()

    # --- the base

    def fold(self, end: MetalogPosition) -> bool:
        """Move the first pack of entries into the base; return whether that was possible. All
        entries of the pack must be durable and below `end`, and enough entries must follow the
        pack.
        """
        pack_end = self._entries.first_pack_end
        end = min(end, self.stored, len(self) - self._kept)
        if pack_end is None or pack_end > end:
            return False
        self.base = self.base.with_entries(self._entries.between(self.base.position, pack_end))
        self._entries.drop_pack()
        self._views = [(at, view) for at, view in self._views if at >= pack_end]
        if self.committed.position < pack_end:
            self.committed = GrowingBase(self.base)
        return True

    def install(self, base: Base) -> Persist:
        """Replace the whole copy by a base; return the frame with the base."""
        self._put_base(base)
        self.stored = 0
        self._unstored = deque(
            None if isinstance(content, int) else content for content in self._unstored
        )
        promised, learner = self.written.promised, self.written.learner
        return self._record(MetalogState(promised, learner, self.extent, base))

    def _put_base(self, base: Base) -> None:
        self.base, self.committed = base, GrowingBase(base)
        self._entries.restart(base.position)
        self._views.clear()

    @property
    def installing(self) -> bool:
        """Whether an installed base is not durable yet. Meanwhile no entry counts as durable."""
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
        assert self.promised <= self.written.promised

    def on_persisted(self, token: int) -> None:
        """Note that the frame with this token is durable."""
        assert self._unstored, "only what was written is made durable"
        first = self._frames - len(self._unstored)
        assert token == first, "frames are made durable in the order they were written"
        content = self._unstored.popleft()
        if isinstance(content, MetalogState):
            self.promised, self.learner = content.promised, content.learner
            if content.base is not None and content.base == self.base:
                self.stored = max(self.stored, self.base.position)
        elif content is not None:
            assert content == self.stored, "what is stored is a prefix"
            self.stored = content + 1


def _fitting(entries: Iterable[Entry], bytes_max: int) -> int:
    """Return how many of the first entries fit into `bytes_max` bytes; at least 1."""
    count = size = 0
    for entry in entries:
        size += size_bound(entry)
        if size > bytes_max and count:
            break
        count += 1
    return count
