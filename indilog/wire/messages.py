"""Every message between nodes: its sender and receiver, its meaning, what happens if it is lost or
repeated.

Messages among sequencers are in `indilog.wire.sequencer_messages`, about tags in
`indilog.wire.tag_messages`, about times and places of records in
`indilog.wire.order_lookup_messages`. Those about old metalog entries are in
`indilog.wire.base_messages`, about conditional appends in `indilog.wire.conditional_messages`,
about cells in `indilog.wire.cell_messages`, about appends through the owner of a log in
`indilog.wire.owner_messages`, about the growth of logs in `indilog.wire.growth_messages`, and about
the nodes and replicas in `indilog.wire.replica_messages`.

The first line of each docstring reads `sender → receiver: meaning`. The line `Lost:` says what
happens if the message is lost, and `Repeated:` why a repetition is harmless; *absolute* refers to
the last paragraph here. docs/PROTOCOL.md is generated from these docstrings; a test keeps both
equal.

A transport may lose, delay and repeat messages; it never changes one. On a socket, messages travel
in an `Envelope` (`indilog.wire.envelope`) with the sender's epoch. Inside one process they are
passed by reference, so they are immutable.

A repeated message is harmless if its fields are *absolute*: they state a length or a start, not a
step.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import msgspec

from indilog.base.ids import (
    Epoch,
    LocalId,
    MetalogPosition,
    NodeId,
    SeqNum,
    ShardId,
    TagHash,
    ViewNumber,
)
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import NO_INCARNATION, Entry, Replicas
from indilog.kernel.view import View
from indilog.wire.base_messages import History, HistoryWanted, MetalogBase, MetalogCovered
from indilog.wire.cell_messages import (
    CellAnswer,
    CellKeysWanted,
    CellsDrop,
    CellsSeal,
    CellsTrim,
    CellWanted,
    CellWrite,
)
from indilog.wire.conditional_messages import (
    ConditionalAnswer,
    ConditionalAppend,
    HomeIs,
    HomeWanted,
)
from indilog.wire.growth_messages import GrowthWanted, LogGrew
from indilog.wire.order_lookup_messages import PlacesFound, PlacesLookup, TimeFound, TimeLookup
from indilog.wire.owner_messages import OwnerAnswer, OwnerAppend
from indilog.wire.replica_messages import PlacementIs, StorageAlive
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogStored,
    Seal,
    Sealed,
)
from indilog.wire.tag_messages import (
    Discarded,
    DiscardedWanted,
    SnapshotWanted,
    TagFirsts,
    TagFirstsWanted,
    TagFloors,
    TagFloorsWanted,
    TrimIs,
    TrimWanted,
)
from indilog.wire.wire_message import WireMessage


class Direction(enum.IntEnum):
    """Which way a bounded read looks from its bound."""

    NEXT = 0
    PREV = 1


# --- append: engine, storage, sequencers


class AppendBatch(WireMessage, frozen=True):
    """engine → storage: a record batch; its header names shard, epoch and localids.

    Lost: the next batch does not follow; storage answers `ShardStored`, and the engine resends from
    there.
    Repeated: localids already stored are not stored again; storage answers `ShardStored`.
    """

    batch: bytes


class ShardStoredWanted(WireMessage, frozen=True):
    """engine → storage: asks for the stored prefix of a shard; sent by its writer `epoch` while it
    waits for an order.

    The question is cheaper than resending batches, which may be lost or only late. The answer says
    which batches the replica lacks.
    Lost: asked again after a pause.
    Repeated: answered again.
    """

    shard: ShardId
    epoch: Epoch


class ShardStored(WireMessage, frozen=True):
    """storage → engine: the gap-free prefix of a shard at this replica. Sent for a refused or known
    batch, on request, and after a start of the storage node.

    `epoch` is the newest writer that the replica knows from the metalog; 0: none. An older writer
    learns from it that it was fenced. A replica also sends this when it learns of a writer.
    Lost: the engine sends `ShardStoredWanted` after a pause.
    Repeated: absolute.
    """

    shard: ShardId
    epoch: Epoch
    stored: LocalId


class ShardProgress(WireMessage, frozen=True):
    """storage → primary: the durable, gap-free prefix of each shard on this node.

    `stored[shard]` is the writer's epoch and a prefix length: 3 says that localids 0, 1 and 2 are
    durable. `term` is the newest term that the sender knows. A primary counts reports of its own
    term only: a report of an earlier term may date from before the sender lost its disk.
    `position`: how many entries are applied; 0 while no shard was ever moved. If an entry moved a
    shard, only nodes that have applied that entry count for the shard.
    Lost: resent with the next change and with the next term, and periodically while something
    stored is not ordered.
    Repeated: the receiver keeps the largest prefix of the shard's writer from the newest
        incarnation of the sender.
    """

    term: Epoch
    stored: dict[ShardId, tuple[Epoch, LocalId]]
    position: MetalogPosition = 0


class MetalogEntries(WireMessage, frozen=True):
    """primary → engine, storage: committed metalog entries from `start` on: the type-O data (thesis
    4.1).

    `previous` is the incarnation that proposed the entry before `start` (0: there is none). With it
    a reader checks that its copy has the same entries up to `start`. `committed` is the number of
    committed entries in all. Sent when entries are committed, and without entries when the primary
    has started. It is also the answer to the `MetalogWanted` of number `request` (0: it is no
    answer). An answer begins where the reader's copy ends, or earlier. If it begins earlier, the
    entries of the copy from there on were replaced.
    Lost: the next one does not follow, and the receiver sends `MetalogWanted`. If no next one
    arrives, the receiver asks when it waits for records to be ordered.
    Repeated: entries already applied are skipped; the second answer matches no question.
    """

    start: MetalogPosition
    previous: Epoch
    entries: tuple[Entry, ...]
    committed: MetalogPosition
    request: int = 0


class MetalogWanted(WireMessage, frozen=True):
    """engine, storage → primary: asks for the committed entries from `start` on.

    `last` is the incarnation that proposed the entry before `start`, the last one that the sender
    has (0: it has none). The primary answers from the position up to which both copies are equal.
    Lost: asked again after a pause, under a new `request`.
    Repeated: answered again, which is harmless.
    """

    start: MetalogPosition
    last: Epoch = NO_INCARNATION
    request: int = 0


class TailWanted(WireMessage, frozen=True):
    """engine → primary: asks for the end of the log and the committed metalog position.

    Lost: asked again until the caller's deadline.
    Repeated: answered again; the engine matches the first answer by `request`.
    """

    request: int
    view: ViewNumber = ViewNumber(0)
    """The newest view that the engine knows; 0: none, so that the answer has the view."""


class TailIs(WireMessage, frozen=True):
    """primary → engine: all committed records are below `tail`; `position` and `cut` belong to this
    tail.

    `time_us` is the primary's time. No committed entry has a later stamp, and no later entry will
    have an earlier one.
    Lost: asked again.
    Repeated: the second one finds no request.
    """

    request: int
    position: MetalogPosition
    tail: SeqNum
    cut: dict[ShardId, LocalId]
    last: Epoch = NO_INCARNATION
    """The incarnation that proposed the last committed entry; 0: there is none."""
    trims: int = 0
    """How many of the committed entries are trims."""
    time_us: int = 0
    """Microseconds since 1970."""
    writers: dict[ShardId, Epoch] = msgspec.field(default_factory=dict)
    """The writer of each shard."""
    replicas: dict[ShardId, Replicas] = msgspec.field(default_factory=dict)
    """The replicas of each shard that an entry moved."""
    view: View | None = None
    """The newest installed view; None: the engine knows it."""


class TermIs(WireMessage, frozen=True):
    """sequencer → engine, storage: the newest term that the sender knows, and its primary. Sent by
    a new primary, by a primary that lacks a report, and by any other sequencer that got a message
    for a primary.

    Lost: the receiver learns the term from the metadata store, or after it has resent its message.
    Repeated: absolute.
    """

    term: Epoch
    primary: NodeId


# --- a writer takes over its shard (thesis 5.5.1)


class ShardWanted(WireMessage, frozen=True):
    """engine → primary: the writer `epoch` wants its shard.

    The primary first orders the previous writer's records that the ack quorum has stored, and then
    proposes `NewWriters`. That entry is the answer. A sole sequencer waits for the reports of all
    replicas.
    Lost: resent until the entry, or `TailIs.writers`, names the writer.
    Repeated: nothing changes once the entry is proposed.
    """

    shard: ShardId
    epoch: Epoch


# --- index data (type-S, thesis 4.1)


class ShardTags(msgspec.Struct, frozen=True, array_like=True):
    """The tags of consecutive records of one shard: a count for each record (u8) and the tags (u64
    each).

    `lost`: the records whose tags no replica has, ascending. Their counts are 0, like those of
    trimmed records, but a lost record may have had any tag.
    """

    shard: ShardId
    first_seqnum: SeqNum
    count: int
    tag_counts: bytes
    tags: bytes
    lost: tuple[LostRange, ...] = ()


class IndexBlock(msgspec.Struct, frozen=True, array_like=True):
    """Index data of one metalog position: all productive shards, and the tags of some of them.

    `tail` is the tail of the log after this position. An entry that ordered nothing has no
    productive shard. `epoch` is the incarnation of the primary that proposed the entry. `previous`
    is the incarnation that proposed the previous entry among the positions of the same index shard
    (0: there is none).
    """

    position: MetalogPosition
    tail: SeqNum
    productive: tuple[ShardId, ...]
    parts: tuple[ShardTags, ...]
    epoch: Epoch = NO_INCARNATION
    previous: Epoch = NO_INCARNATION


class IndexData(WireMessage, frozen=True):
    """storage → index, engine: index data of some metalog positions: the type-S data.

    The first replica of a shard sends it unrequested: each position to one index shard, and to
    every engine. Two storage nodes send it for positions without records. Both also resend the last
    position of each index shard after the first entry of a new incarnation. `copy_of` is the
    incarnation that proposed the sender's last entry: the data agrees with that incarnation's
    metalog.
    Lost: an index node asked about a later position, or an engine that sees a gap, sends
    `IndexDataWanted`.
    Repeated: positions and parts already applied are skipped.
    """

    blocks: tuple[IndexBlock, ...]
    copy_of: Epoch = NO_INCARNATION


class IndexDataWanted(WireMessage, frozen=True):
    """index, engine → storage: asks for the index data of positions `start`, `start + step`, ...
    below `end`.

    The storage node answers with the positions that it has applied, as many as fit one message.
    Lost: asked again after a pause.
    Repeated: answered again.
    """

    start: MetalogPosition
    end: MetalogPosition
    step: int


# --- lookups in the index tier (ARCHITECTURE 9, thesis 5.4)


class IndexLookup(WireMessage, frozen=True):
    """engine → index: asks for the first `count` records with `tag` from `bound` on, below seqnum
    `limit`.

    NEXT: the smallest seqnums in [bound, limit), ascending. PREV: the largest in [0, min(bound,
    limit - 1)], descending. The node answers when it has applied all *its* metalog positions below
    `position`. So every index shard answers about the same prefix of the log, and the aggregate
    skips nothing.
    `names_first`: the engine may have the record in its cache. For a single match other than the
    bound, the engine wants the seqnum instead of the record, and then asks storage itself.
    Lost: the engine restarts the lookup under a new `request` after its deadline.
    Repeated: answered again; the aggregator counts each index shard once.
    """

    request: int
    direction: Direction
    tag: TagHash
    bound: SeqNum
    limit: SeqNum
    position: MetalogPosition
    count: int
    aggregator: NodeId
    names_first: bool = False
    log: TagHash = 0
    """The tag of the log that is read: the floor of a log holds for all its tags."""
    trims: int = 0
    """Trims among the entries below `position`; the node answers when it has applied them all."""
    epoch: Epoch = NO_INCARNATION
    """The incarnation that proposed the entry before `position`. The node answers when its data is
    of the metalog of that incarnation, or of a later one.
    """
    view: ViewNumber = ViewNumber(1)
    """The newest view that an entry below `position` installed. The node answers when it knows this
    view, which names the positions of its index shard.
    """
    index_shards: int = 1
    """How many index shards are asked: those of the view."""


class IndexAnswer(WireMessage, frozen=True):
    """index → aggregator, index: the matches of one index shard, best first, at most `count`.

    The answer goes to the node that the lookup names: an aggregator, or the index node that is the
    master of the lookup.
    `exact`: the only match asked for is the bound itself, and the node has already asked storage to
    answer.
    Lost: the lookup is restarted.
    Repeated: the aggregator counts each index shard once.
    """

    request: int
    origin: NodeId
    direction: Direction
    index_shard: int
    count: int
    exact: bool
    seqnums: tuple[SeqNum, ...]
    shards: tuple[ShardId, ...]
    names_first: bool = False
    bound: SeqNum = 0
    floor: SeqNum = 0
    """The higher of the floors of the tag and of the log; records below it are left out."""
    log_floor: SeqNum = 0
    trims: int = 0
    """As in the lookup."""
    position: MetalogPosition = 0
    """The metalog position after the last trim that the node knows."""
    epoch: Epoch = NO_INCARNATION
    """As in the lookup."""
    lost: tuple[LostRange, ...] = ()
    """Lost records between the bound and the last match, or the end of the search: the nearest
    first, at most 64 ranges. Each of them may have been a match.
    """
    index_shards: int = 1
    """As in the lookup."""


class LookupResult(WireMessage, frozen=True):
    """aggregator, index → engine: the merged matches, best first. Without a match, no record at or
    above `floor` matches, unless `lost` names a range.

    Sent if `count` > 1, if nothing matches, with `names_first`, or if the bound is trimmed.
    Otherwise a single match goes to storage as `ReadRecords`.
    Lost: the lookup is restarted.
    Repeated: the second one finds no request.
    """

    request: int
    seqnums: tuple[SeqNum, ...]
    shards: tuple[ShardId, ...]
    floor: SeqNum = 0
    log_floor: SeqNum = 0
    position: MetalogPosition = 0
    """A node that has applied this many metalog entries has applied all trims in the answer."""
    lost: LostRange | None = None
    """Lost records after the last match. It is unknown which of them match, and which matches
    follow them.
    """


# --- records


class ReadRecords(WireMessage, frozen=True):
    """engine, index, aggregator → storage: asks for the records at these seqnums of a shard;
    storage answers `origin`.

    Storage answers after it has applied the entries that order these seqnums, `trims` trims, and an
    entry of the primary's incarnation `epoch` or a later one.
    Lost: the engine asks another replica after its deadline.
    Repeated: answered again.
    """

    request: int
    origin: NodeId
    shard: ShardId
    seqnums: tuple[SeqNum, ...]
    trims: int = 0
    epoch: Epoch = NO_INCARNATION


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record as storage has it; `names` spells its log and tags (`indilog.base.ids`)."""

    seqnum: SeqNum
    time_us: int
    """The writer's time, microseconds since 1970."""
    ordered_us: int
    """The stamp of the entry that ordered it, microseconds since 1970 on the primary's clock."""
    names: bytes
    data: bytes
    aux: bytes | None


STORED_RECORD_OVERHEAD_BYTES: Final = 32
"""Bytes that a record adds to an answer besides its data, names and aux data; an estimate."""


class RecordsRead(WireMessage, frozen=True):
    """storage → engine: the requested records; `unknown` are those that this replica cannot show.

    Unknown never means absent: the engine asks another replica. `trimmed` are requested records
    that were trimmed, with their log or in all of their tags. `position` is then that of the last
    trim that the sender knows.
    Lost: asked again at another replica.
    Repeated: the second one finds no request.
    """

    request: int
    shard: ShardId
    records: tuple[StoredRecord, ...]
    unknown: tuple[SeqNum, ...]
    trimmed: tuple[SeqNum, ...] = ()
    position: MetalogPosition = 0
    names: tuple[tuple[SeqNum, bytes], ...] = ()
    """The names of those unknown records of which only the data is damaged."""
    away: tuple[SeqNum, ...] = ()
    """Those unknown records that are on cold storage, which did not answer in time."""
    since: MetalogPosition = -1
    """The position of the last entry that moved the shard, as far as the sender knows; -1: none. An
    engine that knows another move does not count the unknown records as lost. The sender may be a
    new replica that has not fetched them, or no longer a replica.
    """


class AuxSet(WireMessage, frozen=True):
    """engine → storage: keep `aux` beside the record, if there is room.

    Lost: the aux data is missing, which is always allowed.
    Repeated: absolute.
    """

    shard: ShardId
    seqnum: SeqNum
    aux: bytes


# --- disks


class DiskFull(WireMessage, frozen=True):
    """storage, primary → engine: this node's disk is full and takes no appends (`full`), or has
    room again.

    Lost: resent while the disk is full. A receiver discards the report when it is not resent.
    Repeated: absolute.
    """

    full: bool


class BatchesWanted(WireMessage, frozen=True):
    """storage → storage: asks for the batches of a shard with the ordered localids [first, end),
    which the sender lacks.

    Lost: asked again after a pause, of another replica.
    Repeated: answered again.
    """

    shard: ShardId
    first: LocalId
    end: LocalId


class Batches(WireMessage, frozen=True):
    """storage → storage: intact batches among the requested ones from `first` on, as many as fit.

    Without batches: this replica does not have the batch of `first` either. Only batches of ordered
    records are sent, because all replicas have the same.
    Lost: asked again.
    Repeated: batches no longer missing are ignored.
    """

    shard: ShardId
    first: LocalId
    batches: tuple[bytes, ...]
    gone: tuple[tuple[LocalId, LocalId], ...] = ()
    """Localids [first, end) among the requested ones that were trimmed and discarded here."""
    lacking_to: LocalId = 0
    """This replica has durably lost all records from `first` to below this localid: a restart would
    not find them either. Not greater than `first`: no loss is certain.
    """
    trims: int = 0
    """How many trims this replica has applied: those of `gone` are among them."""
    copy_of: Epoch = NO_INCARNATION
    """As in `IndexData`: of which incarnation of the primary."""


Message: TypeAlias = (
    AppendBatch
    | ShardStoredWanted
    | ShardStored
    | ShardProgress
    | StorageAlive
    | PlacementIs
    | MetalogAppend
    | MetalogStored
    | Seal
    | Sealed
    | MetalogEntries
    | MetalogWanted
    | MetalogBase
    | MetalogCovered
    | HistoryWanted
    | History
    | TailWanted
    | TailIs
    | TermIs
    | TrimWanted
    | TrimIs
    | TagFloors
    | TagFloorsWanted
    | DiscardedWanted
    | Discarded
    | ShardWanted
    | IndexData
    | IndexDataWanted
    | IndexLookup
    | IndexAnswer
    | LookupResult
    | TagFirstsWanted
    | TagFirsts
    | SnapshotWanted
    | ReadRecords
    | RecordsRead
    | AuxSet
    | DiskFull
    | BatchesWanted
    | Batches
    | TimeLookup
    | TimeFound
    | PlacesLookup
    | PlacesFound
    | HomeWanted
    | HomeIs
    | ConditionalAppend
    | ConditionalAnswer
    | CellWrite
    | CellWanted
    | CellsTrim
    | CellKeysWanted
    | CellsSeal
    | CellsDrop
    | CellAnswer
    | OwnerAppend
    | OwnerAnswer
    | GrowthWanted
    | LogGrew
)

ForSequencer: TypeAlias = (
    ShardProgress
    | StorageAlive
    | MetalogStored
    | MetalogAppend
    | MetalogWanted
    | MetalogCovered
    | TailWanted
    | TrimWanted
    | ShardWanted
    | Seal
    | Sealed
)
"""The messages that a sequencer handles, as primary or backup."""
