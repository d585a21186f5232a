"""The metalog: the decisions of the sequencers, from which every node derives the same order
(ARCHITECTURE 2).

An entry has a dense position. `NewRecords` is a cut, written as a difference: how many further
records of each productive shard are ordered. A node that has applied all entries below position p
knows exactly the records below seqnum `tail(p)`. The order inside an entry ascends by shard id
(Scalog 4.1), so a shard's records of one entry are consecutive.

`Trim` raises floors; records below a floor are forgotten (ARCHITECTURE 13). Trims are numbered, so
a node that receives only trims detects a gap.

`NewWriters` gives shards to new writers. If an earlier writer stored a record, and no entry before
this one ordered it, the record is never ordered (decision 0047). `NewReplicas` moves shards to
other storage nodes (decision 0048). `NewView` installs the next view (decision 0049).

Sequencers (`indilog_ordering`) propose entries. All other roles apply them with `MetalogReplay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from indilog.base.errors import ConfigError, MalformedFrameError
from indilog.base.ids import (
    MAX_SEQNUM,
    Epoch,
    LocalId,
    MetalogPosition,
    NodeId,
    SeqNum,
    ShardId,
    TagHash,
    ViewNumber,
)
from indilog.kernel.view import NODE_NAME_MAX, SHARDS_MAX, View


class _MetalogEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all entries. All nodes must read an entry alike, so a field of a later release is an
    error (decision 0093).
    """


class NewRecords(_MetalogEntry, frozen=True, tag="N"):
    """A cut: `counts[shard]` further records of each productive shard are ordered, ascending by
    shard.
    """

    position: MetalogPosition
    view: ViewNumber
    epoch: Epoch
    counts: dict[ShardId, int]
    time_us: int = 0
    """When the entry was proposed, in microseconds since 1970 on the primary's clock
    (`indilog_ordering.entry_clock`). Never smaller than in an entry before it. It is `ordered_at`
    of the records.
    """


class _OrdersNothing(_MetalogEntry, frozen=True):
    """An entry that orders no records."""

    position: MetalogPosition
    view: ViewNumber
    epoch: Epoch

    @property
    def counts(self) -> Mapping[ShardId, int]:
        """No records of any shard."""
        return _NOTHING

    @property
    def time_us(self) -> int:
        """0: the entry has no stamp of its own and takes that of the entry before it."""
        return 0


class NewWriters(_OrdersNothing, frozen=True, tag="W"):
    """Each of these shards gets a new writer, whose first localid is the shard's ordered length at
    this entry. Earlier writers are fenced. The entry orders no records.
    """

    writers: dict[ShardId, Epoch]
    """The writer's epoch, greater than those of the shard's earlier writers."""


class NewReplicas(_OrdersNothing, frozen=True, tag="R"):
    """From this entry on, each of these shards has these replicas. The entry orders no records.

    The first ones are the counting replicas (`Placement`), as many as the shard has in the view. A
    new counting replica stores the batches that the writer sends, from the shard's ordered length
    at this entry on. It fetches older records from other replicas.
    """

    replicas: dict[ShardId, tuple[NodeId, ...]]


class NewView(_OrdersNothing, frozen=True, tag="V"):
    """From this entry on, the cluster has these nodes. The entry orders no records."""

    following: View


class Replicas(NamedTuple):
    """The replicas of a shard, in order of preference, and the position of the entry that names
    them.
    """

    since: MetalogPosition
    nodes: tuple[NodeId, ...]


class Floor(NamedTuple):
    """Records with `tag` below seqnum `until` are trimmed; `of_log`: whether it is the tag of a
    log.

    Floors only grow. If two floors of a tag arrive, in any order, the higher one is valid.

    Attributes:
        log: the tag of the log whose records have `tag`; 0: not given. The floor of a tag has an
            effect only if it is above the floor of this log.
    """

    tag: TagHash
    until: SeqNum
    of_log: bool
    log: TagHash = TagHash(0)


class FloorCursor(NamedTuple):
    """The last floor of a page; floors of tags come first, ascending, then those of logs."""

    of_log: bool = False
    tag: TagHash = 0


NO_FLOORS: Final = FloorCursor()
"""The cursor before the first page."""


class Trim(_OrdersNothing, frozen=True, array_like=True, tag="T"):
    """Floors of logs and tags rise; the entry orders no records. `number` trims came before it."""

    number: int
    floors: tuple[Floor, ...]


_NOTHING: Final[Mapping[ShardId, int]] = {}

Entry: TypeAlias = NewRecords | NewWriters | NewReplicas | NewView | Trim
"""All kinds of entries."""

TRIM_FLOORS_MAX: Final = 1024
"""Floors in one entry."""
WRITERS_MAX: Final = 1024
"""New writers in one entry."""
MOVES_MAX: Final = 64
"""Shards with new replicas in one entry."""
REPLICAS_MAX: Final = 16
"""Replicas of one shard."""
_ENTRY_BYTES: Final = 64
_FLOOR_BYTES: Final = 29
_COUNT_BYTES: Final = 12
"""Largest encoded size in bytes: of an entry without its items, of a floor, and of a shard's count
or writer. An integer takes at most nine bytes, a shard three.
"""
_NAME_BYTES: Final = NODE_NAME_MAX + 2


def is_possible(entry: Entry) -> bool:
    """Whether a decoded entry is valid. Each of its shards is a number of two bytes (thesis 5.1.1)
    and has at least one record, or a writer or replicas. Tags, seqnums and nodes are valid.
    """
    if isinstance(entry, Trim):
        return len(entry.floors) <= TRIM_FLOORS_MAX and all(
            0 <= floor.tag < 2**64 and 0 <= floor.until <= MAX_SEQNUM for floor in entry.floors
        )
    if isinstance(entry, NewWriters):
        writers = entry.writers
        return 0 < len(writers) <= WRITERS_MAX and all(
            0 <= shard < SHARDS_MAX and epoch > 0 for shard, epoch in writers.items()
        )
    if isinstance(entry, NewReplicas):
        return 0 < len(entry.replicas) <= MOVES_MAX and all(
            0 <= shard < SHARDS_MAX and _are_possible(replicas)
            for shard, replicas in entry.replicas.items()
        )
    if isinstance(entry, NewView):
        return _is_possible_view(entry.following)
    counts = entry.counts
    return (
        min(counts, default=0) >= 0
        and max(counts, default=0) < SHARDS_MAX
        and (min(counts.values(), default=1) > 0)
    )


def _is_possible_view(view: View) -> bool:
    try:
        view.check()
    except ConfigError:
        return False
    return all(0 <= shard < SHARDS_MAX for shard in view.shards)


def replicas_in(entry: NewReplicas) -> dict[ShardId, Replicas]:
    """Return the replicas that an entry names."""
    return {shard: Replicas(entry.position, nodes) for shard, nodes in entry.replicas.items()}


def _are_possible(replicas: tuple[NodeId, ...]) -> bool:
    return (
        0 < len(replicas) <= REPLICAS_MAX
        and len({*replicas}) == len(replicas)
        and all(0 < len(name.encode()) <= NODE_NAME_MAX for name in replicas)
    )


class Base(msgspec.Struct, frozen=True, array_like=True):
    """A base: a summary that replaces all entries below `position` (decision 0030).

    Attributes:
        position: the number of entries that it replaces.
        last: the incarnation that proposed the last of them; 0: there is none.
        tail: how many records they order.
        cut: how many records of each shard they order.
        trims: how many of them are trims. Storage nodes keep the floors.
        time_us: the last stamp among them.
        writers: the newest writer of each shard.
        replicas: the newest replicas of each shard that was moved.
        view: the last view that they install; None: no entry installs one.
    """

    position: MetalogPosition = 0
    last: Epoch = Epoch(0)
    tail: SeqNum = 0
    cut: dict[ShardId, LocalId] = {}
    trims: int = 0
    time_us: int = 0
    writers: dict[ShardId, Epoch] = {}
    replicas: dict[ShardId, Replicas] = {}
    view: View | None = None

    @property
    def is_possible(self) -> bool:
        """Whether this can be the base of any entries."""
        counts = (self.position, self.trims, self.time_us, *self.cut.values())
        return (
            all(0 <= count <= MAX_SEQNUM for count in counts)
            and self.tail == sum(self.cut.values())
            and self.trims <= self.position
            and (self.last > 0) == (self.position > 0)
            and all(0 <= shard < SHARDS_MAX for shard in (*self.cut, *self.writers, *self.replicas))
            and all(_are_possible(replicas.nodes) for replicas in self.replicas.values())
            and (self.view is None or _is_possible_view(self.view))
        )

    def with_entries(self, entries: Iterable[Entry]) -> Base:
        """Return the base that also summarises these entries, which follow from `position` on."""
        growing = GrowingBase(self)
        for entry in entries:
            growing.apply(entry)
        return growing.base()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)
_page_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])


def size_bound(entry: Entry) -> int:
    """Return an upper bound of an encoded entry's size in bytes, mostly without encoding it."""
    if isinstance(entry, Trim):
        return _ENTRY_BYTES + _FLOOR_BYTES * len(entry.floors)
    if isinstance(entry, NewReplicas):
        names = sum(map(len, entry.replicas.values()))
        return _ENTRY_BYTES + _COUNT_BYTES * len(entry.replicas) + _NAME_BYTES * names
    if isinstance(entry, NewView):
        return len(_encoder.encode(entry))
    shards = entry.writers if isinstance(entry, NewWriters) else entry.counts
    return _ENTRY_BYTES + _COUNT_BYTES * len(shards)


def encode_entry(entry: Entry) -> bytes:
    """Return the bytes of one entry, as in journals."""
    return _encoder.encode(entry)


def decode_entry(payload: bytes) -> Entry:
    """Return the entry in `payload`.

    Raises:
        MalformedFrameError: this release cannot decode the payload.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not a metalog entry: {error}") from error


NO_INCARNATION: Final = Epoch(0)
"""The epoch of no incarnation, or of an unknown one: epochs begin at 1."""


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Return the bytes of several consecutive entries, as in ordering journals."""
    return _encoder.encode(entries)


def decode_entries(payload: bytes) -> tuple[Entry, ...]:
    """Return the entries in `payload`.

    Raises:
        MalformedFrameError: this release cannot decode the payload.
    """
    try:
        return _page_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not metalog entries: {error}") from error


class Span(NamedTuple):
    """Consecutive records of one shard that one entry ordered: localid and seqnum grow together."""

    shard: ShardId
    first_localid: LocalId
    first_seqnum: SeqNum
    length: int

    @property
    def end_seqnum(self) -> SeqNum:
        """The seqnum after the last record."""
        return self.first_seqnum + self.length


class MetalogReplay:
    """The state after the entries below `position`.

    Invariant: `tail == sum(cut.values())` for a replay that started at the beginning. A replay may
    also start at a given `(position, tail, cut, trims)`.
    """

    __slots__ = ("cut", "last", "position", "tail", "trims")

    def __init__(
        self,
        position: MetalogPosition = 0,
        tail: SeqNum = 0,
        cut: Mapping[ShardId, LocalId] | None = None,
        trims: int = 0,
        last: Epoch = NO_INCARNATION,
    ) -> None:
        self.trims = trims
        """How many of the entries are `Trim`s."""
        self.last = last
        """The incarnation that proposed the last entry; 0: there is none, or it is not known."""
        self.position = position
        self.tail = tail
        self.cut: dict[ShardId, LocalId] = dict(cut or {})

    def apply(self, entry: Entry) -> list[Span]:
        """Apply the entry at `position`; return the spans that it ordered, ascending by shard and
        seqnum.
        """
        assert entry.position == self.position, "entries are applied in order, without gaps"
        spans: list[Span] = []
        cut, tail = self.cut, self.tail
        for shard in sorted(entry.counts):
            count = entry.counts[shard]
            first = cut.get(shard, 0)
            spans.append(Span(shard, first, tail, count))
            cut[shard] = first + count
            tail += count
        assert tail >= self.tail, "an entry orders records or none"
        self.tail = tail
        self.position += 1
        self.last = entry.epoch
        if isinstance(entry, Trim):
            self.trims += 1
        return spans


class GrowingBase(MetalogReplay):
    """A base to which entries are added one by one."""

    __slots__ = ("_replicas", "_time_us", "_writers", "view")

    def __init__(self, base: Base) -> None:
        super().__init__(base.position, base.tail, base.cut, base.trims, base.last)
        self._time_us = base.time_us
        self._writers = dict(base.writers)
        self._replicas = dict(base.replicas)
        self.view = base.view
        """The last view that entries install; None: no entry installs one."""

    def apply(self, entry: Entry) -> list[Span]:
        """Add the next entry; return the spans that it ordered."""
        self._time_us = max(self._time_us, entry.time_us)
        if isinstance(entry, NewWriters):
            self._writers.update(entry.writers)
        elif isinstance(entry, NewReplicas):
            self._replicas |= replicas_in(entry)
        elif isinstance(entry, NewView):
            self.view = entry.following
        return super().apply(entry)

    @property
    def writers(self) -> dict[ShardId, Epoch]:
        """The writer of each shard that has one; a copy."""
        return dict(self._writers)

    @property
    def replicas(self) -> dict[ShardId, Replicas]:
        """The replicas of each shard that was moved; a copy."""
        return dict(self._replicas)

    def base(self) -> Base:
        """Return the base that summarises all entries so far."""
        assert self.trims <= self.position, "each trim is an entry"
        return Base(
            self.position, self.last, self.tail, dict(self.cut), self.trims, self._time_us,
            self.writers, self.replicas, self.view,
        )  # fmt: skip
