"""Three sequencers under loss, repetition, reordering and restarts, with a model of the true state.

The model uses evidence that the sequencers do not share. It is the records that replicas physically
have, the frames on each disk, and the messages that left the primary. Writers take over shards as
decision 0047 describes (`ShardWanted`, then an entry `NewWriters`). Replicas then drop unordered
records of earlier writers, so a prefix may shrink.

A process crashes between any two steps, also after `MetalogAppend` was sent and before its entries
are synced. Of the unsynced frames any prefix survives. `indilog.roles.role` allows two times for
`Persisted`, and both are tested. At the sync: then messages leave at once. When the frame is
written: then only messages that promise nothing leave before the sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Entry, NewWriters, decode_entry
from indilog.kernel.view import View, view_of
from indilog.roles.role import (
    Effect,
    Event,
    FrameKind,
    Ignore,
    Location,
    Lost,
    Persist,
    Persisted,
    Received,
    Send,
)
from indilog.wire.messages import (
    Message,
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    ShardWanted,
    TailIs,
    TailWanted,
    TermIs,
)
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogStored,
    Seal,
    Sealed,
)
from indilog_ordering.entries import Entries
from indilog_ordering.sequencer import Sequencer
from tests.support.metalog_messages import started

VIEW: Final[View] = view_of(sequencers=3, storage_nodes=3, replicas=2, engines=3)
CONFIG: Final = Config(node=node_config(resend_s=1.0, metalog_entries_in_flight_max=3))
PRIMARY: Final = VIEW.sequencers[0]
BACKUPS: Final = VIEW.sequencers[1:]
ENGINE: Final = NodeId("engine-0")
NOWHERE: Final = Location(0, 0, 0)


class Replica:
    """One storage node's copy of one shard."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self.stored = 0


class Frame(NamedTuple):
    """A frame on a disk."""

    kind: FrameKind
    payload: bytes
    lost: Lost | None = None
    """The readable part of the frame at a restart, if the frame is damaged."""


class Taken(NamedTuple):
    """A checkpoint, and the content of the frames before it."""

    frames: list[bytes]
    payload: bytes


class Held(NamedTuple):
    """A message that leaves when the given number of frames is on disk."""

    frames: int
    to: NodeId
    message: Message


class Letter(NamedTuple):
    """A message in flight, from one incarnation of its sender."""

    sender: NodeId
    to: NodeId
    message: Message
    incarnation: Epoch


class Process:
    """One sequencer: a role, its disk, and the frames that are written but not synced.

    Args:
        persisted_early: the role gets `Persisted` before the sync.
    """

    def __init__(self, name: NodeId, *, persisted_early: bool) -> None:
        self.name = name
        self.persisted_early = persisted_early
        self.starts = 0
        self.disk: list[Frame] = []
        self.wiped = False
        """Whether the metadata store has a note that the journal was used."""
        self.unsynced: list[Persist] = []
        self.held: list[Held] = []
        self.taken: Taken | None = None
        """The newest checkpoint; it is valid when the frames before it are on disk."""

    def start(self) -> list[Event]:
        """Restart from the disk."""
        self.starts += 1
        self.unsynced.clear()
        self.held.clear()
        self.role = self.recovered()
        return started(self.starts, PRIMARY)

    def letter(self, to: NodeId, message: Message) -> Letter:
        """Return a message of this incarnation."""
        return Letter(self.name, to, message, Epoch(self.starts))

    def recovered(self) -> Sequencer:
        """Return the role after a restart."""
        role = Sequencer(self.name, [VIEW], CONFIG)
        role._metalog._entries = Entries(page=3, unpacked_min=2)  # so that some are packed
        self.wiped = self.wiped and not self.disk
        if self.wiped:
            role.lost(Lost(None, b"", NOWHERE))
        taken = self.taken
        if taken is not None and taken.frames == [
            f.payload for f in self.disk[: len(taken.frames)]
        ]:
            role.restore(taken.payload, ())
        else:
            taken = None
        for kind, payload, lost in self.disk[len(taken.frames) if taken is not None else 0 :]:
            if lost is not None:
                role.lost(lost)
            else:
                role.recover(kind, payload, NOWHERE)
        role.recovered()
        return role

    def metalog(self) -> list[Entry]:
        """Entries that a restart would find: a frame replaces its entry, and removes later ones."""
        entries: list[Entry] = []
        for frame in self.disk:
            if frame.kind is not FrameKind.METALOG:
                continue
            entry = decode_entry(frame.payload)
            assert entry.position <= len(entries), "no gap on a disk"
            entries[entry.position :] = [entry]
        return entries


def received(letter: Letter) -> Received:
    """Return the event of the message's arrival."""
    return Received(letter.sender, letter.message, letter.incarnation)


class OrderingTier:
    """Three sequencers, three shards with two replicas each."""

    ignored: tuple[str, ...] = (
        "a message of an older term",
        "a message of an earlier incarnation",
        "an answer to another term",
        "entries that do not follow this copy",
        "a shard wanted by an earlier writer",
        "a report that was sent to the primary of another term",
    )
    """Reasons for which sequencers may ignore an event."""

    def __init__(self, *, persisted_early: bool) -> None:
        self.now = 0.0
        self.replicas = {
            (shard, node): Replica() for shard, p in VIEW.shards.items() for node in p.replicas
        }
        self.applied = 0
        """How many published entries storage nodes may have applied; all before are published."""
        self.writers = dict.fromkeys(VIEW.shards, (Epoch(0), 0))
        """The newest writer of each shard that published entries name, and where it began."""
        self.wanted = dict.fromkeys(VIEW.shards, Epoch(0))
        """The newest writer that asked for each shard."""
        self.network: list[Letter] = []
        self.late: list[Letter] = []
        self.incarnations = dict.fromkeys((*VIEW.storage_nodes, ENGINE), Epoch(1))
        """The incarnations of the other nodes."""
        self.published: dict[int, Entry] = {}
        self.written: dict[int, Entry] = {}
        """The last entry that any sequencer has written at each position."""
        self.proposed = dict.fromkeys(VIEW.shards, 0)
        """The maximum prefix of each shard that any entry ordered."""
        self.processes = {
            name: Process(name, persisted_early=persisted_early) for name in VIEW.sequencers
        }
        for name, process in self.processes.items():
            self.give(name, *process.start())
        for shard in VIEW.shards:
            self.take_over(shard)
        self.settle()
        for shard in VIEW.shards:
            for which in range(2):
                self.open_shard(shard, which)

    def restart(self, name: NodeId) -> None:
        """Restart a sequencer from its disk.

        A connection ends with either of its processes, so no message of an earlier incarnation of a
        storage node arrives any more.
        """
        for letters in (self.network, self.late):
            letters[:] = [letter for letter in letters if self.is_of_this_incarnation(letter, name)]
        self.give(name, *self.processes[name].start())

    def is_of_this_incarnation(self, letter: Letter, to: NodeId) -> bool:
        """Whether a message may still arrive at a node that restarts now."""
        incarnation = self.incarnations.get(letter.sender)
        return letter.to != to or incarnation is None or letter.incarnation == incarnation

    # --- the world

    def give(self, name: NodeId, *events: Event) -> None:
        process = self.processes[name]
        written = len(process.unsynced)
        for effect in process.role.handle(events, Instant(self.now)):
            self.perform(process, effect)
        process.role.check_invariants()
        if process.persisted_early and (fresh := process.unsynced[written:]):
            self.give(name, *(Persisted(persist.token, NOWHERE) for persist in fresh))

    def perform(self, process: Process, effect: Effect) -> None:
        match effect:
            case Persist():
                process.unsynced.append(effect)
                self.note_proposed(effect)
            case Send(message=TermIs()):
                pass  # readers know the only primary
            case Send(to=to, message=MetalogAppend() as message):
                self.network.append(process.letter(to, message))
            case Send(to=to, message=message) if process.persisted_early:
                frames = len(process.disk) + len(process.unsynced)
                process.held.append(Held(frames, to, message))
                self.release(process)
            case Send(to=to, message=message):
                self.leave(process, to, message)
            case Ignore(reason=reason):
                assert reason.startswith(self.ignored), reason
            case other:
                raise AssertionError(f"a sequencer has no reason for {other}")

    def release(self, process: Process) -> None:
        """Send the messages that waited for frames that are on disk now."""
        while process.held and process.held[0].frames <= len(process.disk):
            _, to, message = process.held.pop(0)
            self.leave(process, to, message)

    def leave(self, process: Process, to: NodeId, message: Message) -> None:
        match message:
            case MetalogEntries(start=start, previous=previous, entries=entries) as page:
                assert to in VIEW.engines + VIEW.storage_nodes
                assert page.committed >= len(entries) + start
                assert page.committed > max(self.published, default=-1), "no less than published"
                before = self.published.get(start - 1)
                assert before is None or before.epoch == previous
                for entry in entries:
                    assert self.published.setdefault(entry.position, entry) == entry
                self.apply_published()
                self.check_published()
            case TailIs() as tail:
                ordered = self.ordered()
                assert tail.tail >= sum(ordered.values()), "a published record is below the tail"
                assert all(tail.cut.get(s, 0) >= length for s, length in ordered.items())
                assert tail.tail == sum(tail.cut.values())
            case MetalogStored(matched=matched):
                self.check_stored(process, None, matched)
                self.network.append(process.letter(to, message))
            case Sealed(extent=extent):
                self.check_stored(process, extent.last, extent.length)
                self.network.append(process.letter(to, message))
            case Seal():
                self.network.append(process.letter(to, message))
            case other:
                raise AssertionError(f"a sequencer has no reason for {other}")

    def check_stored(self, process: Process, last: Epoch | None, length: int) -> None:
        """Check that acknowledged entries are on disk, the last of them of term `last`."""
        entries = process.metalog()[:length]
        assert len(entries) == length
        assert last is None or last == (entries[-1].epoch if entries else 0)

    def check_published(self) -> None:
        """Check that a published entry never changes, and stays on a majority of disks from its
        publication on.
        """
        kept = {name: process.metalog() for name, process in self.processes.items()}
        for position, entry in self.published.items():
            holding = [name for name, metalog in kept.items() if metalog[position:][:1] == [entry]]
            assert len(holding) >= 2, "a published entry survives the loss of any one disk"

    def ask_for_missing(self) -> None:
        """Request missing entries: a restarted primary publishes only its last page."""
        missing = next(p for p in range(len(self.published) + 1) if p not in self.published)
        if missing < len(self.published):
            last = self.published[missing - 1].epoch if missing else Epoch(0)
            self.say(ENGINE, MetalogWanted(missing, last))

    def ordered(self, end: int | None = None) -> dict[ShardId, int]:
        """Return the prefix of each shard that the published entries order; only those below `end`
        if it is given.
        """
        lengths = dict.fromkeys(VIEW.shards, 0)
        for position, entry in self.published.items():
            if end is not None and position >= end:
                continue
            for shard, count in entry.counts.items():
                lengths[shard] += count
        return lengths

    def common(self, shard: ShardId) -> int:
        """Return the prefix that all replicas of a shard have."""
        return min(replica.stored for (s, _), replica in self.replicas.items() if s == shard)

    def reports(self) -> Iterator[tuple[NodeId, Message]]:
        for node in VIEW.storage_nodes:
            stored = {
                shard: (replica.epoch, replica.stored)
                for (shard, owner), replica in self.replicas.items()
                if owner == node and replica.epoch
            }
            yield node, ShardProgress(self.term, stored)

    @property
    def term(self) -> Epoch:
        """The term of the only primary."""
        return self.processes[PRIMARY].role._leadership.term

    # --- storage

    def store(self, shard: ShardId, which: int, count: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        if replica.epoch == self.writers[shard][0]:
            replica.stored += count

    def store_everywhere(self, shard: ShardId, count: int) -> None:
        """The common case: a batch reaches all replicas, and they report it."""
        for which in range(len(VIEW.shards[shard].replicas)):
            self.store(shard, which, count)
        self.report_all()

    def report_all(self) -> None:
        for node, message in self.reports():
            self.say(node, message)

    def say(self, sender: NodeId, message: Message) -> None:
        """Send the primary a message of another node."""
        self.network.append(Letter(sender, PRIMARY, message, self.incarnations[sender]))

    def report(self, which: int) -> None:
        node, message = list(self.reports())[which]
        self.say(node, message)

    def take_over(self, shard: ShardId) -> None:
        """Let a new writer ask for a shard."""
        self.wanted[shard] = Epoch(self.wanted[shard] + 1)
        self.ask_for_shard(shard)

    def ask_for_shard(self, shard: ShardId) -> None:
        """Ask for a shard, unless published entries name its newest writer."""
        if self.wanted[shard] > self.writers[shard][0]:
            writer = VIEW.shards[shard].writer
            message = ShardWanted(shard, self.wanted[shard])
            self.network.append(Letter(writer, PRIMARY, message, self.incarnations[ENGINE]))

    def apply_published(self) -> None:
        """Follow the published entries up to the first missing one."""
        while (entry := self.published.get(self.applied)) is not None:
            self.applied += 1
            if isinstance(entry, NewWriters):
                ordered = self.ordered(self.applied)
                for shard, epoch in entry.writers.items():
                    self.writers[shard] = (epoch, ordered[shard])

    def open_shard(self, shard: ShardId, which: int) -> None:
        """Let a replica apply the entry that names its newest writer: the replica drops what is
        not ordered there.
        """
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        epoch, start = self.writers[shard]
        if replica.epoch < epoch:
            replica.epoch, replica.stored = epoch, start

    def wipe_replica(self, node: NodeId) -> None:
        """Restart a storage node without its disk; its writers keep running and resend their
        batches.

        The primary notices the restart, because a node without its disk first requests the whole
        metalog. The node fetches records that were proposed on its earlier reports from other
        replicas.
        """
        self.incarnations[node] = Epoch(self.incarnations[node] + 1)
        self.give(PRIMARY, Received(node, MetalogWanted(0), self.incarnations[node]))
        for (shard, owner), replica in self.replicas.items():
            if owner == node:
                replica.stored = min(replica.stored, self.proposed[shard])

    def note_proposed(self, persist: Persist) -> None:
        """Record the prefix of each shard that an entry written by any sequencer would order."""
        if persist.kind is FrameKind.METALOG:
            entry = decode_entry(persist.payload)
            self.written[entry.position] = entry
            before = [e.counts for p, e in self.written.items() if p <= entry.position]
            for shard, length in self.proposed.items():
                self.proposed[shard] = max(length, sum(c.get(shard, 0) for c in before))

    # --- network, disks, time

    def deliver(self, which: int, *, repeat: bool) -> None:
        if self.network:
            which %= len(self.network)
            letter = self.network[which]
            if not repeat:
                del self.network[which]
            self.give(letter.to, received(letter))

    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.deliver(0, repeat=False)

    def lose(self, which: int) -> None:
        if self.network:
            del self.network[which % len(self.network)]

    def put_off(self, which: int) -> None:
        """Delay a message: it arrives after any number of other messages and crashes."""
        if self.network:
            self.late.append(self.network.pop(which % len(self.network)))

    def put_off_entries(self, which: int) -> None:
        """Delay a message to a backup."""
        places = [i for i, letter in enumerate(self.network) if letter.to in BACKUPS]
        if places:
            self.put_off(places[which % len(places)])

    def deliver_late(self, which: int) -> None:
        if self.late:
            letter = self.late.pop(which % len(self.late))
            self.give(letter.to, received(letter))

    def lag(self) -> None:
        """The backups sync, and the primary's disk does not."""
        for _ in range(3):
            self.deliver_in_order(6)
            for name in BACKUPS:
                self.sync(name, 3)

    def sync(self, name: NodeId, count: int) -> None:
        process = self.processes[name]
        synced, process.unsynced = process.unsynced[:count], process.unsynced[count:]
        for persist in synced:
            process.disk.append(Frame(persist.kind, persist.payload))
            self.release(process)
        if not process.persisted_early:
            self.give(name, *(Persisted(persist.token, NOWHERE) for persist in synced))

    def take_checkpoint(self, name: NodeId) -> None:
        """Take a checkpoint of a sequencer that handled `Persisted` for all its frames."""
        process = self.processes[name]
        if process.persisted_early or not process.unsynced:
            frames = [frame.payload for frame in process.disk]
            frames += [persist.payload for persist in process.unsynced]
            process.taken = Taken(frames, process.role.checkpoint()())

    def sync_everywhere(self) -> None:
        for name in VIEW.sequencers:
            self.sync(name, 3)

    def crash(self, name: NodeId, kept_max: int) -> None:
        """Crash a process and restart it; the given part of the unsynced frames is on its disk."""
        process = self.processes[name]
        process.disk += [Frame(kept.kind, kept.payload) for kept in process.unsynced[:kept_max]]
        self.restart(name)

    def wait(self, duration_s: float) -> None:
        self.now += duration_s
        self.ask_for_missing()
        for name, process in self.processes.items():
            due = process.role.deadline()
            if due is not None and due <= self.now:
                self.give(name)

    def ask_tail(self) -> None:
        self.give(PRIMARY, Received(ENGINE, TailWanted(1), self.incarnations[ENGINE]))

    # --- claims

    def check(self) -> None:
        """Check that all replicas have the records ordered by published entries."""
        self.check_published()
        for shard, length in self.ordered().items():
            assert length <= self.common(shard)

    def heal(self) -> None:
        """Stop all losses; then records on all replicas become ordered, and the sequencers' disks
        become equal.
        """
        # A new entry replaces a lost one that a backup still has.
        for _ in range(20):
            for shard in VIEW.shards:
                self.ask_for_shard(shard)
                for which in range(2):
                    self.open_shard(shard, which)
            self.report_all()
            self.settle()
            self.wait(CONFIG.node.messages.resend_s)
            if all(self.wanted[shard] == self.writers[shard][0] for shard in VIEW.shards):
                break
        assert all(self.wanted[shard] == self.writers[shard][0] for shard in VIEW.shards)
        for shard in VIEW.shards:
            for which in range(2):
                self.open_shard(shard, which)
        self.store_everywhere(min(VIEW.shards), 1)
        for _ in range(200):
            self.report_all()
            self.settle()
            if all(self.ordered()[shard] == self.common(shard) for shard in VIEW.shards):
                break
            self.wait(CONFIG.node.messages.resend_s)
        assert self.ordered() == {shard: self.common(shard) for shard in VIEW.shards}
        # Entries are resent after the longest pause to a backup whose messages were lost.
        self.wait(CONFIG.node.messages.resend_s_max)
        self.settle()
        entries = [self.published[position] for position in range(len(self.published))]
        self.check_disks(entries)
        self.ask_tail()

    def check_disks(self, entries: list[Entry]) -> None:
        """Check that all disks hold exactly these entries."""
        assert all(process.metalog() == entries for process in self.processes.values())

    def settle(self) -> None:
        """Deliver and sync until no node has a message to send."""
        self.sync_everywhere()
        for _ in range(10_000):
            if not self.network:
                return
            self.deliver(0, repeat=False)
            self.sync_everywhere()
        raise AssertionError("the nodes exchange messages without end")
