"""A5: sequencers with damaged or wiped disks, the primary's too, together with all other faults: no
published entry is lost or changed (decision 0042).

The expected entries come from the messages of the primary and from the frames on disk, which are
decoded here independently.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, NodeId
from indilog.kernel.metalog import Entry, decode_entry
from indilog.roles.role import FrameKind, Lost
from indilog.wire.messages import Message, MetalogEntries
from tests.properties.test_ordering import faults, restarts, work
from tests.support.ordering_tier import BACKUPS, NOWHERE, PRIMARY, VIEW, OrderingTier, Process

decoded = functools.lru_cache(4096)(decode_entry)


def evidence(process: Process) -> Mapping[int, Entry]:
    """Return the entries of intact frames, by position.

    The last frame of a position counts; an entry that differs removes all after it.
    """
    found: dict[int, Entry] = {}
    for frame in process.disk:
        if frame.lost is None and frame.kind is FrameKind.METALOG:
            entry = decoded(frame.payload)
            if found.setdefault(entry.position, entry) != entry:
                found = {at: kept for at, kept in found.items() if at < entry.position}
                found[entry.position] = entry
    return found


class DamagedTier(OrderingTier):
    """Disks of which some or all frames become unreadable."""

    def __init__(self, *, persisted_early: bool) -> None:
        self.held_once: dict[NodeId, list[Entry]] = {}
        super().__init__(persisted_early=persisted_early)

    def take_checkpoint(self, name: NodeId) -> None:
        """Take no checkpoint: the evidence here comes from frames."""

    def leave(self, process: Process, to: NodeId, message: Message) -> None:
        """A newly published entry is, or was, on two disks."""
        fresh: list[Entry] = []
        if isinstance(message, MetalogEntries):
            fresh = [entry for entry in message.entries if entry.position not in self.published]
        super().leave(process, to, message)
        if fresh:
            for entry in fresh:
                holding = [
                    name
                    for name, other in self.processes.items()
                    if evidence(other).get(entry.position) == entry
                    or entry in self.held_once.get(name, ())
                ]
                assert len(holding) >= 2

    def check_published(self) -> None:
        """No published entry is missing on all disks, while one disk at a time is damaged."""
        kept = [evidence(process) for process in self.processes.values()]
        for position, entry in self.published.items():
            assert any(found.get(position) == entry for found in kept)

    def check_stored(self, process: Process, last: Epoch | None, length: int) -> None:
        if length and last is not None:
            assert evidence(process)[length - 1].epoch == last

    def check(self) -> None:
        self.check_published()
        for shard, length in self.ordered().items():
            assert length <= self.common(shard)

    def check_disks(self, entries: list[Entry]) -> None:
        """A restart finds exactly these entries on all disks."""
        for name, process in self.processes.items():
            self.sync(name, len(process.unsynced))
            assert evidence(process).items() >= dict(enumerate(entries)).items()
            role = process.recovered()
            assert role._metalog.page(0, len(entries) + 1) == tuple(entries)
            assert not role.learner

    def all_count(self) -> bool:
        """Whether no sequencer is a learner, or would be after a restart."""
        return not any(
            process.role.learner or process.recovered().learner
            for process in self.processes.values()
        )

    def note(self, name: NodeId) -> Process:
        """Record the entries of a process: it may have acknowledged them in a message in flight."""
        process = self.processes[name]
        self.held_once.setdefault(name, []).extend(evidence(process).values())
        return process

    def damage(self, name: NodeId, chance: Random) -> None:
        """Make some consecutive frames unreadable; a restart detects it."""
        process = self.note(name)
        if process.disk:
            start = chance.randrange(len(process.disk))
            for place in range(start, min(start + chance.choice([1, 1, 2, 5]), len(process.disk))):
                frame = process.disk[place]
                lost = Lost(chance.choice([frame.kind, None]), b"", NOWHERE)
                process.disk[place] = frame._replace(lost=lost)
        self.restart(name)

    def wipe(self, name: NodeId) -> None:
        process = self.note(name)
        process.disk.clear()
        process.wiped = True
        self.restart(name)


def losses(tier: DamagedTier, chance: Random, *, always: bool) -> list[Callable[[], None]]:
    """Losses of disks; unless `always`, only while no sequencer is a learner."""

    def lose(how: Callable[[NodeId], None]) -> None:
        if always or tier.all_count():
            how(chance.choice([PRIMARY, PRIMARY, *BACKUPS]))

    return [
        lambda: lose(lambda name: tier.damage(name, chance)),
        lambda: lose(tier.wipe),
    ]


def go_on(tier: DamagedTier, chance: Random) -> None:
    """The common case: an entry is stored, and the sequencers order more."""
    for _ in range(chance.randint(1, 4)):
        tier.store_everywhere(chance.choice(sorted(VIEW.shards)), 1)
        tier.deliver_in_order(chance.randint(3, 12))
        tier.sync_everywhere()


def run(tier: DamagedTier, chance: Random, lost: list[Callable[[], None]]) -> None:
    """Run one seed: it enables some of the faults, and loses more or less."""
    goes_wrong = faults(tier, chance)
    goes_wrong = chance.sample(goes_wrong, chance.randint(0, len(goes_wrong)))
    goes_on = [*work(tier, chance), *restarts(tier, chance)]
    goes_on += [lambda: go_on(tier, chance)] * chance.choice([1, 5, 10])
    often = chance.choice([0.0, 0.1, 0.3, 0.6])
    losing = chance.choice([0.02, 0.05, 0.1])
    for _ in range(150):
        if chance.random() < losing:
            chance.choice(lost)()
        wrong = goes_wrong and chance.random() < often
        chance.choice(goes_wrong if wrong else goes_on)()
        tier.check()


@given(seed=st.integers(0, 2**32))
def test_entries_lost_by_one_sequencer_are_restored_from_the_others(seed: int) -> None:
    """One sequencer at a time lacks entries: the log continues, and all disks become equal."""
    chance = Random(seed)
    tier = DamagedTier(persisted_early=chance.random() < 0.5)
    run(tier, chance, losses(tier, chance, always=False))
    tier.heal()
    tier.check()


@given(seed=st.integers(0, 2**32))
def test_no_published_entry_is_replaced_after_any_losses_on_all_disks(seed: int) -> None:
    """Too much may be lost to continue; then the primary reports it, and orders nothing."""
    chance = Random(seed)
    tier = DamagedTier(persisted_early=chance.random() < 0.5)
    tier.check_published = lambda: None  # type: ignore[method-assign]  # all disks may have lost it
    with contextlib.suppress(DataLossError):
        run(tier, chance, losses(tier, chance, always=True))
