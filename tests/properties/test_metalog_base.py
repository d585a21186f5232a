"""The base that replaces old metalog entries is bounded over the life of the log (decision 0030). A
sequencer that lacks any entries recovers with it.

Each entry that leaves the primary is kept here, so a base is compared with the sum of the published
entries below it.
"""

from __future__ import annotations

from random import Random
from typing import Final

import pytest

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Base, Entry, Floor
from indilog.kernel.view import view_of
from indilog.roles.role import (
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
from indilog.wire.base_messages import MetalogBase, MetalogCovered
from indilog.wire.messages import MetalogEntries, MetalogWanted, ShardProgress, ShardWanted, TermIs
from indilog.wire.sequencer_messages import MetalogAppend
from indilog.wire.tag_messages import TrimIs, TrimWanted
from indilog_ordering.sequencer import Sequencer
from tests.support.metalog_messages import started

KEPT: Final = 8
CONFIG: Final = Config(
    node=node_config(metalog_entries_kept=KEPT, metalog_entries_in_flight_max=5, resend_s=1.0)
)
VIEW: Final = view_of(sequencers=3)
PRIMARY, FIRST, SECOND = VIEW.sequencers
STORAGE, ENGINE = VIEW.storage_nodes[0], VIEW.engines[0]
NOWHERE: Final = Location(0, 0, 0)
ONE: Final = Epoch(1)


class Disk:
    """Frames and the two newest checkpoints of one sequencer, and its running role."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, bytes]] = []
        self.checkpoints: list[tuple[int, bytes]] = []
        self.starts = 0
        self.wiped = False

    def wipe(self) -> None:
        self.frames, self.checkpoints, self.wiped = [], [], True


class Trio:
    """Three sequencers whose messages arrive at once, or not at all."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.config = config
        self.now = 1000.0
        self.published: list[Entry] = []
        self.asked = 0
        self.bases: list[Base] = []
        """Bases that the engine received instead of entries."""
        self.cut_off: set[NodeId] = set()
        self.stored = 0
        self.disks = {name: Disk() for name in VIEW.sequencers}
        self.roles: dict[NodeId, Sequencer] = {}
        for name in reversed(VIEW.sequencers):
            self.start(name)
        self.say(ENGINE, ShardWanted(ShardId(0), ONE))

    def start(self, name: NodeId, *, older: bool = False) -> None:
        """Start from the newest checkpoint, or the one before it."""
        disk = self.disks[name]
        disk.starts += 1
        role = self.roles[name] = Sequencer(name, [VIEW], self.config)
        if older:
            del disk.checkpoints[1:]
        if disk.wiped and not disk.frames:
            role.lost(Lost(None, b"", NOWHERE))
        at = 0
        if disk.checkpoints:
            at, payload = disk.checkpoints[-1]
            role.restore(payload, ())
        for kind, payload in disk.frames[at:]:
            role.recover(kind, payload, NOWHERE)
        role.recovered()
        self.give(name, *started(disk.starts))

    def give(self, name: NodeId, *events: Event) -> None:
        """Deliver events and the messages that follow from them, until no message is left."""
        pending: list[tuple[NodeId, Event]] = [(name, event) for event in events]
        while pending:
            to, event = pending.pop(0)
            role, disk = self.roles[to], self.disks[to]
            persisted: list[tuple[NodeId, Event]] = []
            for effect in role.handle([event], Instant(self.now)):
                if isinstance(effect, Persist):
                    disk.frames.append((effect.kind, effect.payload))
                    persisted.append((to, Persisted(effect.token, NOWHERE)))
                elif isinstance(effect, Send) and effect.to in self.roles:
                    if not {to, effect.to} & self.cut_off:
                        incarnation = Epoch(disk.starts)
                        pending.append((effect.to, Received(to, effect.message, incarnation)))
                elif isinstance(effect, Send) and effect.to not in VIEW.sequencers:
                    self.hear(effect)
                elif isinstance(effect, Send):
                    pass  # that sequencer was not started yet
                else:
                    assert isinstance(effect, Ignore)
            behind = next(
                (at for at, (_, one) in enumerate(pending) if not isinstance(one, Persisted)),
                len(pending),
            )
            pending[behind:behind] = persisted
            role.check_invariants()

    def hear(self, effect: Send) -> None:
        match effect.message:
            case MetalogEntries(entries=entries) if effect.to == ENGINE:
                for entry in entries:
                    if entry.position < len(self.published):
                        assert self.published[entry.position] == entry
                    elif entry.position == len(self.published):
                        self.published.append(entry)
            case MetalogBase(base=base):
                self.bases.append(base)
            case MetalogEntries() | TermIs() | TrimIs() | MetalogAppend():
                pass
            case other:
                raise AssertionError(f"nothing for readers: {other}")

    @property
    def term(self) -> Epoch:
        return self.roles[PRIMARY]._leadership.term

    def append(self, records: int = 1) -> None:
        self.now += 0.001
        self.stored += records
        self.say(STORAGE, ShardProgress(self.term, {ShardId(0): (ONE, self.stored)}))

    def say(self, sender: NodeId, message: object) -> None:
        self.give(PRIMARY, Received(sender, message, ONE))  # type: ignore[arg-type]

    def trim(self) -> None:
        self.asked += 1
        self.say(ENGINE, TrimWanted(self.asked, Floor(7, 0, of_log=False)))

    def cover(self, position: int) -> None:
        last = self.published[position - 1].epoch if position else Epoch(0)
        self.say(STORAGE, MetalogCovered(self.term, position, last))

    def checkpoint(self, name: NodeId) -> None:
        disk = self.disks[name]
        taken = len(disk.frames), self.roles[name].checkpoint()()
        disk.checkpoints = [*disk.checkpoints[-1:], taken]

    def wait(self, seconds: float = 20.0) -> None:
        """Advance the time until all resent requests are answered; the engine asks for entries."""
        for _ in range(20):
            self.now += seconds / 20
            for name, role in self.roles.items():
                if (due := role.deadline()) is not None and due <= self.now:
                    self.give(name)
            self.say(STORAGE, ShardProgress(self.term, {ShardId(0): (ONE, self.stored)}))
        last = self.published[-1].epoch if self.published else Epoch(0)
        self.say(ENGINE, MetalogWanted(len(self.published), last, 1))

    def check(self) -> None:
        """All copies equal the published entries, as single entries or as a base."""
        for role in self.roles.values():
            metalog = role._metalog
            base = metalog.base
            assert base == Base().with_entries(self.published[: base.position])
            end = min(len(metalog), len(self.published))
            assert list(metalog.page(base.position, end)) == self.published[base.position : end]


def test_entries_and_checkpoints_of_sequencers_do_not_grow_with_the_log() -> None:
    trio = Trio()
    sizes: list[dict[NodeId, int]] = []
    for _ in range(5):
        for number in range(100):
            trio.append()
            if number % 10 == 0:
                trio.trim()
                trio.cover(len(trio.published))
        for name in VIEW.sequencers:
            trio.checkpoint(name)
        sizes.append({name: len(disk.checkpoints[-1][1]) for name, disk in trio.disks.items()})
        assert all(r.length - r._metalog.base.position <= 40 for r in trio.roles.values())
    assert len(trio.published) == 552, "with the fence and the shard's writer"
    trio.check()
    for name in VIEW.sequencers:
        assert sizes[-1][name] <= sizes[0][name] + 40


def test_entries_that_a_storage_node_may_request_are_not_folded() -> None:
    trio = Trio()
    for _ in range(60):
        trio.append()
    assert trio.roles[PRIMARY]._metalog.base == Base()
    trio.cover(30)
    for _ in range(60):
        trio.append()
    assert 20 < trio.roles[PRIMARY]._metalog.base.position <= 30
    trio.say(STORAGE, MetalogWanted(30, trio.published[29].epoch, 1))
    assert trio.bases == []


def test_a_request_for_a_folded_entry_is_answered_with_the_base() -> None:
    trio = Trio()
    for _ in range(60):
        trio.append()
    trio.cover(60)
    for _ in range(60):
        trio.append()
    trio.say(ENGINE, MetalogWanted(3, trio.published[2].epoch, 1))
    (base,) = trio.bases
    assert base == Base().with_entries(trio.published[: base.position])
    assert base.position > 3


def test_a_covered_entry_that_was_replaced_is_not_counted() -> None:
    trio = Trio()
    for _ in range(40):
        trio.append()
    trio.say(STORAGE, MetalogCovered(trio.term, 40, Epoch(0)))
    for _ in range(40):
        trio.append()
    assert trio.roles[PRIMARY]._metalog.base == Base()


def test_a_restarted_storage_node_counts_as_covering_no_entry() -> None:
    trio = Trio()
    for _ in range(40):
        trio.append()
    before = trio.roles[PRIMARY]._metalog.base.position
    trio.cover(40)
    trio.give(PRIMARY, Received(STORAGE, MetalogWanted(0), Epoch(2)))
    folded = trio.roles[PRIMARY]._metalog.base.position
    for _ in range(40):
        trio.stored += 1
        report = ShardProgress(trio.term, {ShardId(0): (ONE, trio.stored)})
        trio.give(PRIMARY, Received(STORAGE, report, Epoch(2)))
    assert before == 0
    assert trio.roles[PRIMARY]._metalog.base.position == folded


@pytest.mark.parametrize("wiped", [False, True])
def test_a_backup_below_the_base_starts_from_the_base(*, wiped: bool) -> None:
    trio = Trio()
    trio.append()
    trio.cut_off = {SECOND}
    for _ in range(80):
        trio.append()
        trio.cover(len(trio.published))
    if wiped:
        trio.disks[SECOND].wipe()
    trio.cut_off = set()
    trio.start(SECOND)
    trio.wait()
    second = trio.roles[SECOND]
    assert (second.length, second.learner) == (len(trio.published), False)
    assert second._metalog.base.position > 1
    trio.check()
    trio.start(SECOND)
    trio.wait()
    assert trio.roles[SECOND].length == len(trio.published)


def test_a_wiped_primary_starts_from_the_base_of_a_backup() -> None:
    trio = Trio()
    for _ in range(80):
        trio.append()
        trio.cover(len(trio.published))
    before = len(trio.published)
    trio.disks[PRIMARY].wipe()
    trio.start(PRIMARY)
    trio.wait()
    assert trio.roles[PRIMARY].committed >= before
    trio.append()
    trio.check()
    trio.start(PRIMARY)
    trio.wait()
    trio.check()


def test_a_primary_on_an_older_copy_of_its_directory_adopts_the_base_of_a_backup() -> None:
    trio = Trio()
    for _ in range(30):
        trio.append()
    kept = list(trio.disks[PRIMARY].frames)
    for _ in range(40):
        trio.append()
        trio.cover(len(trio.published))
    assert all(trio.roles[name]._metalog.base.position > 30 for name in (FIRST, SECOND))
    before = len(trio.published)
    trio.disks[PRIMARY].frames = kept
    trio.start(PRIMARY)
    trio.wait()
    assert trio.roles[PRIMARY].committed > before
    trio.append()
    trio.check()
    for name in (FIRST, SECOND):
        trio.start(name)
        trio.wait()
    trio.check()


@pytest.mark.parametrize("seed", range(60))
def test_copies_equal_the_published_entries_after_any_wipes_partitions_and_restarts(
    seed: int,
) -> None:
    chance = Random(seed)
    trio = Trio()
    for _ in range(chance.randrange(40, 160)):
        match chance.randrange(14):
            case 0:
                trio.cut_off = set() if trio.cut_off else {chance.choice([FIRST, SECOND])}
            case 1 if not trio.cut_off and not any(role.learner for role in trio.roles.values()):
                name = chance.choice(VIEW.sequencers)
                trio.disks[name].wipe()
                trio.start(name)
                trio.wait()
            case 2:
                trio.start(chance.choice(VIEW.sequencers), older=chance.random() < 0.5)
                trio.wait()
            case 3 | 4:
                trio.checkpoint(chance.choice(VIEW.sequencers))
            case 5 | 6:
                trio.cover(len(trio.published) - chance.randrange(min(4, len(trio.published) + 1)))
            case 7:
                trio.trim()
            case _:
                trio.append(chance.randrange(1, 4))
        trio.check()
    trio.cut_off = set()
    trio.wait()
    trio.append()
    trio.wait()
    assert all(role.length == len(trio.published) for role in trio.roles.values())
    trio.check()
