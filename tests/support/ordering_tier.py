"""Three sequencers under loss, repetition, reordering and restarts, and what is true about them.

The model is made of evidence that the sequencers do not share: what the replicas physically have,
what is on each disk, and what left the primary. Storage takes over writers as ARCHITECTURE 8 and
the messages `ShardClaim` and `ShardOpen` say, so prefixes may shrink to the smallest of all
replicas.

A process crashes between any two steps, so also when `MetalogAppend` has left and its entries are
not synced; of what was written and not synced any prefix survives. It gives its role `Persisted` in
one of two ways, both of which `indilog.roles.role` allows: at the sync, and then messages leave at
once; or when the frame is written, and then only what promises nothing leaves before the sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Entry, entry_decoded
from indilog.kernel.view import View, view_of
from indilog.roles.role import (
    METALOG_ENTRY_KINDS,
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
    Started,
)
from indilog.wire.messages import (
    Message,
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    TailIs,
    TailWanted,
)
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogCopy,
    MetalogCopyWanted,
    MetalogStored,
)
from indilog_ordering.entries import Entries
from indilog_ordering.sequencer import Sequencer

VIEW: Final[View] = view_of(sequencers=3, storage_nodes=3, replicas=2, engines=3)
CONFIG: Final = Config(node=node_config(resend_s=1.0, metalog_entries_in_flight_max=3))
ENGINE: Final = NodeId("engine-0")
NOWHERE: Final = Location(0, 0, 0)


class Replica:
    """One storage node's copy of one shard."""

    def __init__(self) -> None:
        self.epoch = 1
        self.stored = 0


class Frame(NamedTuple):
    """A frame on a disk."""

    kind: FrameKind
    payload: bytes
    lost: Lost | None = None
    """What a restart gets in its place if it is damaged."""


class Taken(NamedTuple):
    """A checkpoint, and what is in the frames before it."""

    frames: list[bytes]
    payload: bytes


class Held(NamedTuple):
    """A message that leaves when so many frames are on disk."""

    frames: int
    to: NodeId
    message: Message


class Letter(NamedTuple):
    """A message on its way, from one incarnation of its sender."""

    sender: NodeId
    to: NodeId
    message: Message
    incarnation: Epoch


class Process:
    """One sequencer: a role, its disk, and what is written but not synced.

    Args:
        told_early: the role gets `Persisted` before the sync.
    """

    def __init__(self, name: NodeId, *, told_early: bool) -> None:
        self.name = name
        self.told_early = told_early
        self.starts = 0
        self.disk: list[Frame] = []
        self.wiped = False
        """Whether the metadata store knows that there was a journal."""
        self.unsynced: list[Persist] = []
        self.held: list[Held] = []
        self.taken: Taken | None = None
        """The newest checkpoint; it counts when the frames before it are on the disk."""

    def start(self) -> Event:
        """Begin anew from what is on disk."""
        self.starts += 1
        self.unsynced.clear()
        self.held.clear()
        self.role = self.recovered()
        return Started(Epoch(self.starts))

    def letter(self, to: NodeId, message: Message) -> Letter:
        """Return a message of this incarnation."""
        return Letter(self.name, to, message, Epoch(self.starts))

    def recovered(self) -> Sequencer:
        """Return the role that a restart finds."""
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
        """What a restart would find: a frame replaces its entry, and drops those after it."""
        entries: list[Entry] = []
        for frame in self.disk:
            entry = entry_decoded(frame.payload)
            assert entry.position <= len(entries), "no gap on a disk"
            entries[entry.position :] = [entry]
        return entries


def received(letter: Letter) -> Received:
    """Return the event of its arrival."""
    return Received(letter.sender, letter.message, letter.incarnation)


def shared(one: Sequence[Entry], other: Sequence[Entry]) -> int:
    """How many entries two metalogs have in common, from the first on."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


class OrderingTier:
    """Three sequencers, three shards with two replicas each."""

    ignored: tuple[str, ...] = (
        "it is not known yet",
        "metalog entries from an older incarnation",
        "a message of an earlier incarnation",
    )
    """What sequencers may ignore, and why."""

    def __init__(self, *, told_early: bool) -> None:
        self.now = 0.0
        self.replicas = {
            (shard, node): Replica() for shard, p in VIEW.shards.items() for node in p.replicas
        }
        self.writers = dict.fromkeys(VIEW.shards, (1, 0))
        """The newest writer of each shard and where it began."""
        self.network: list[Letter] = []
        self.late: list[Letter] = []
        self.lives = dict.fromkeys((*VIEW.storage_nodes, ENGINE), Epoch(1))
        """The incarnations of nodes that are no sequencers."""
        self.published: dict[int, Entry] = {}
        self.written: dict[int, Entry] = {}
        """The last entry that any sequencer has written at each position."""
        self.proposed = dict.fromkeys(VIEW.shards, 0)
        """How far each shard was ordered by any entry, at most."""
        self.shared = dict.fromkeys(VIEW.backups, 0)
        """How much of the primary's disk each backup's disk had, at most."""
        self.processes = {name: Process(name, told_early=told_early) for name in VIEW.sequencers}
        for name, process in self.processes.items():
            self.give(name, process.start())

    def restart(self, name: NodeId) -> None:
        """Start a sequencer again from its disk.

        A connection ends with either of its processes, so nothing arrives any more of an earlier
        incarnation of a storage node.
        """
        for letters in (self.network, self.late):
            letters[:] = [letter for letter in letters if self.is_of_this_life(letter, name)]
        self.give(name, self.processes[name].start())

    def is_of_this_life(self, letter: Letter, to: NodeId) -> bool:
        """Whether a message may still arrive at a node that restarts now."""
        life = self.lives.get(letter.sender)
        return letter.to != to or life is None or letter.incarnation == life

    # --- the world

    def give(self, name: NodeId, *events: Event) -> None:
        process = self.processes[name]
        written = len(process.unsynced)
        for effect in process.role.handle(events, Instant(self.now)):
            self.perform(process, effect)
        process.role.check_invariants()
        if process.told_early and (fresh := process.unsynced[written:]):
            self.give(name, *(Persisted(persist.token, NOWHERE) for persist in fresh))

    def perform(self, process: Process, effect: Effect) -> None:
        match effect:
            case Persist():
                process.unsynced.append(effect)
                self.note_proposed(effect)
            case Send(to=to, message=MetalogAppend() as message):
                self.network.append(process.letter(to, message))
            case Send(to=to, message=message) if process.told_early:
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
        """Let out what waited for frames that are on disk now."""
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
                self.check_published()
            case TailIs() as told:
                ordered = self.ordered()
                assert told.tail >= sum(ordered.values()), "a published record is below the tail"
                assert all(told.cut.get(s, 0) >= length for s, length in ordered.items())
                assert told.tail == sum(told.cut.values())
            case MetalogStored(epoch=epoch, length=length):
                self.check_stored(process, epoch, length)
                self.network.append(process.letter(to, message))
            case MetalogCopyWanted() | MetalogCopy():
                self.network.append(process.letter(to, message))
            case other:
                raise AssertionError(f"a sequencer has no reason for {other}")

    def check_stored(self, process: Process, epoch: Epoch, length: int) -> None:
        """What is answered for is on disk."""
        last = [entry.epoch for entry in process.metalog()[:length]][-1:]
        assert last == ([epoch] if length else [])

    def check_published(self) -> None:
        """What was published never changes, and is on the primary's disk and on another one: at
        that moment and ever after.
        """
        kept = {name: process.metalog() for name, process in self.processes.items()}
        for position, entry in self.published.items():
            holding = [name for name, metalog in kept.items() if metalog[position:][:1] == [entry]]
            assert VIEW.primary in holding, "what the primary published it never loses"
            assert len(holding) >= 2, "a published entry survives the loss of any one disk"

    def ask_for_missing(self) -> None:
        """After a restart the primary publishes its last page only; readers ask for the rest."""
        missing = next(p for p in range(len(self.published) + 1) if p not in self.published)
        if missing < len(self.published):
            last = self.published[missing - 1].epoch if missing else Epoch(0)
            self.say(ENGINE, MetalogWanted(missing, last))

    def ordered(self) -> dict[ShardId, int]:
        """How far each shard is ordered by what was published."""
        lengths = dict.fromkeys(VIEW.shards, 0)
        for entry in self.published.values():
            for shard, count in entry.counts.items():
                lengths[shard] += count
        return lengths

    def common(self, shard: ShardId) -> int:
        """What all replicas of a shard have."""
        return min(replica.stored for (s, _), replica in self.replicas.items() if s == shard)

    def reports(self) -> Iterator[tuple[NodeId, Message]]:
        for node in VIEW.storage_nodes:
            stored = {
                shard: (Epoch(replica.epoch), replica.stored)
                for (shard, owner), replica in self.replicas.items()
                if owner == node
            }
            yield node, ShardProgress(stored)

    # --- storage

    def store(self, shard: ShardId, which: int, count: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        if replica.epoch == self.writers[shard][0]:
            replica.stored += count

    def store_everywhere(self, shard: ShardId, count: int) -> None:
        """The common case: a batch reaches all replicas, and they say so."""
        for which in range(len(VIEW.shards[shard].replicas)):
            self.store(shard, which, count)
        self.report_all()

    def report_all(self) -> None:
        for node, message in self.reports():
            self.say(node, message)

    def say(self, sender: NodeId, message: Message) -> None:
        """Let a node that is no sequencer send a message to the primary."""
        self.network.append(Letter(sender, VIEW.primary, message, self.lives[sender]))

    def report(self, which: int) -> None:
        node, message = list(self.reports())[which]
        self.say(node, message)

    def take_over(self, shard: ShardId) -> None:
        self.writers[shard] = (self.writers[shard][0] + 1, self.common(shard))

    def open_shard(self, shard: ShardId, which: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        epoch, start = self.writers[shard]
        if replica.epoch < epoch:
            replica.epoch, replica.stored = epoch, start

    def wipe_replica(self, node: NodeId) -> None:
        """Restart a storage node without its disk; its writers live on and open it again.

        The primary learns of the restart: a node without its disk asks for the whole metalog before
        anything else. What was proposed on its earlier word it gets back from other replicas.
        """
        self.lives[node] = Epoch(self.lives[node] + 1)
        self.give(VIEW.primary, Received(node, MetalogWanted(0), self.lives[node]))
        for (shard, owner), replica in self.replicas.items():
            if owner == node:
                replica.stored = min(replica.stored, self.proposed[shard])

    def note_proposed(self, persist: Persist) -> None:
        """Note how far an entry that some sequencer writes would order each shard."""
        if persist.kind in METALOG_ENTRY_KINDS:
            entry = entry_decoded(persist.payload)
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
        """Let a message be late: it arrives after any number of others, and crashes."""
        if self.network:
            self.late.append(self.network.pop(which % len(self.network)))

    def put_off_entries(self, which: int) -> None:
        """Let a message to a backup be late."""
        places = [i for i, letter in enumerate(self.network) if letter.to in VIEW.backups]
        if places:
            self.put_off(places[which % len(places)])

    def deliver_late(self, which: int) -> None:
        if self.late:
            letter = self.late.pop(which % len(self.late))
            self.give(letter.to, received(letter))

    def lag(self) -> None:
        """The backups do their part, and the primary's disk does not."""
        for _ in range(3):
            self.deliver_in_order(6)
            for name in VIEW.backups:
                self.sync(name, 3)

    def sync(self, name: NodeId, count: int) -> None:
        process = self.processes[name]
        synced, process.unsynced = process.unsynced[:count], process.unsynced[count:]
        for persist in synced:
            process.disk.append(Frame(persist.kind, persist.payload))
            self.release(process)
        if not process.told_early:
            self.give(name, *(Persisted(persist.token, NOWHERE) for persist in synced))

    def take_checkpoint(self, name: NodeId) -> None:
        """Take a checkpoint of a sequencer that got `Persisted` for all its frames."""
        process = self.processes[name]
        if process.told_early or not process.unsynced:
            frames = [frame.payload for frame in process.disk]
            frames += [persist.payload for persist in process.unsynced]
            process.taken = Taken(frames, process.role.checkpoint()())

    def sync_everywhere(self) -> None:
        for name in VIEW.sequencers:
            self.sync(name, 3)

    def crash(self, name: NodeId, kept_max: int) -> None:
        """End a process and start it again; so much of what was not synced is on its disk."""
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
        self.give(VIEW.primary, Received(ENGINE, TailWanted(1), self.lives[ENGINE]))

    # --- claims

    def check(self) -> None:
        """All that published entries order is on all replicas, and no backup drops what is on the
        primary's disk.
        """
        self.check_published()
        for shard, length in self.ordered().items():
            assert length <= self.common(shard)
        metalog = self.processes[VIEW.primary].metalog()
        for backup, before in self.shared.items():
            self.shared[backup] = shared(self.processes[backup].metalog(), metalog)
            assert self.shared[backup] >= before

    def heal(self) -> None:
        """From now on nothing is lost: everything that all replicas have becomes ordered, and the
        sequencers' disks become equal.
        """
        # A new entry replaces what a backup still has of a lost one.
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
        # A backup whose messages were lost is sent them again after the longest pause.
        self.wait(CONFIG.node.messages.resend_s_max)
        self.settle()
        entries = [self.published[position] for position in range(len(self.published))]
        self.check_disks(entries)
        self.ask_tail()

    def check_disks(self, entries: list[Entry]) -> None:
        """All disks hold these entries, and nothing else."""
        assert all(process.metalog() == entries for process in self.processes.values())

    def settle(self) -> None:
        """Deliver and sync until no node has anything to send."""
        self.sync_everywhere()
        for _ in range(10_000):
            if not self.network:
                return
            self.deliver(0, repeat=False)
            self.sync_everywhere()
        raise AssertionError("they talk for ever")
