"""Checks during a run that published metalog entries never change and that all copies agree. No
entry orders records of a shard that a view has ended (A9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, ShardId, majority
from indilog.kernel.metalog import (
    Entry,
    NewRecords,
    NewView,
    NewWriters,
    Trim,
    decode_entry,
    encode_entry,
)
from indilog.kernel.view import NO_WRITER, View
from indilog.roles.role import Effect, Event
from indilog.testing.simulation import SimulatedCluster
from indilog_ordering.sequencer import Sequencer
from indilog_ordering.stored_metalog import StoredMetalog
from tests.simulation.history import Violation
from tests.simulation.sequencer_faults import home_of, leading

_SYNCED_WITHIN_S: Final = 10.0


class MetalogNotes:
    """A copy of the committed entries; appends each contradiction to `violations`."""

    def __init__(self, violations: list[Violation]) -> None:
        self._violations = violations
        self._entries: list[bytes] = []
        self._term = 0
        """The greatest term of a primary that was noted."""
        self._tails = [0]
        self._time_us = 0
        self._views: list[View] = []
        """The views that committed entries install."""
        self._ended: set[ShardId] = set()
        """Shards that a view took from their compute nodes; they have no new writer yet."""
        self._stored: dict[NodeId, dict[MetalogPosition, set[Epoch]]] = {}
        """For each sequencer and position, the terms of the entries that its disk has had."""
        self._primaries: set[int] = set()
        """The copies of primaries: of the newest term, and of those that do not know of it yet."""
        self._copied: MetalogPosition = 0
        """Below this, what the primary calls committed was found at enough sequencers."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check sequencers in each iteration, and entries before the primary folds them."""
        fold, handle = StoredMetalog.fold, Sequencer.handle

        def seen(role: Sequencer, events: Sequence[Event], now: Instant) -> list[Effect]:
            effects = handle(role, events, now)
            self._see_stored(role)
            if role._primary is not None:
                self._see_committed(role)
            return effects

        def noted(metalog: StoredMetalog, end: MetalogPosition) -> bool:
            pack_end = metalog._entries.first_pack_end
            if id(metalog) in self._primaries and pack_end is not None and pack_end <= end:
                for entry in metalog.iterate(metalog.base.position, pack_end):
                    if entry.position == len(self._entries):
                        self._append(entry)
            return fold(metalog, end)

        with (
            patch.object(StoredMetalog, "fold", noted),
            patch.object(Sequencer, "handle", seen),
        ):
            yield

    def _see_stored(self, role: Sequencer) -> None:
        """Note the entries that are durable at a sequencer, received one by one or as a base."""
        change = self._primaries.discard if role._primary is None else self._primaries.add
        change(id(role._metalog))
        metalog, epochs = role._metalog, self._stored.setdefault(role._node, {})
        position = metalog.stored
        while position > metalog.base.position:
            position -= 1
            known = epochs.setdefault(position, set())
            if (epoch := metalog[position].epoch) in known:
                break  # what is before it was noted with it
            known.add(epoch)

    def _see_committed(self, role: Sequencer) -> None:
        """Check that committed entries of the primary were on the disks of a majority, before or
        after a change of the sequencers in this iteration.

        They are not checked again, because disks may lose them. Entries below a sequencer's base
        were noted there, or came from a primary that has committed them.
        """
        metalog = role._metalog
        view = metalog.committed.view or role._view
        configurations = {frozenset(role.sequencers), frozenset(view.sequencers)}
        self._copied = min(self._copied, len(metalog))
        start = max(self._copied, metalog.base.position)
        for position in range(start, role.committed):
            epoch = metalog[position].epoch
            having = {
                node for node, epochs in self._stored.items() if epoch in epochs.get(position, ())
            }
            if all(len(having & nodes) < majority([*nodes]) for nodes in configurations):
                what = f"the entry at {position} is called committed, only {having} had it"
                self._violations.append(Violation("committed", what))
                return
        self._copied = max(self._copied, role.committed)

    def note(self, cluster: SimulatedCluster) -> None:
        """Keep a copy of what the primary calls committed and may have published: it never changes.

        During a sync the primary may be ahead of its disk; that part is not published yet.
        """
        primary = leading(cluster)
        if primary is None or home_of(cluster, primary).holding:
            return
        if (term := primary.status()["term"]) < self._term:
            return  # it was replaced by a primary that is down; its last entries may be void
        self._term = term
        self._compare(primary, "the primary")
        if (base := primary._metalog.base.position) > len(self._entries):
            what = f"the primary has a base at {base}, {len(self._entries)} entries were committed"
            self._violations.append(Violation("metalog", what))
            return
        for entry in primary._metalog.page(len(self._entries), primary.committed):
            self._append(entry)

    def _append(self, entry: Entry) -> None:
        self._entries.append(encode_entry(entry))
        self._tails.append(self._tails[-1] + sum(entry.counts.values()))
        self._check_ended(entry)
        if isinstance(entry, NewRecords):
            if entry.time_us < self._time_us:
                what = f"the entry at {entry.position} is stamped before an earlier one"
                self._violations.append(Violation("time", what))
            self._time_us = entry.time_us

    def _check_ended(self, entry: Entry) -> None:
        """Check that an entry orders nothing of a shard after the view that ended it. A finalized
        shard gets no further writer.
        """
        if isinstance(entry, NewView):
            before = self._views[-1].shards if self._views else {}
            self._views.append(entry.following)
            for shard, placed in entry.following.shards.items():
                known = before.get(shard)
                is_taken = known is not None and known.writer not in {placed.writer, NO_WRITER}
                if is_taken or placed.writer == NO_WRITER:
                    self._ended.add(shard)
        elif isinstance(entry, NewWriters):
            shards = self._views[-1].shards if self._views else {}
            finalized = [s for s in entry.writers if s in shards and shards[s].finalized]
            if finalized:
                what = f"the entry at {entry.position} gives finalized shards {finalized} a writer"
                self._violations.append(Violation("sealed", what))
            self._ended.difference_update(entry.writers)
        if beyond := self._ended.intersection(entry.counts):
            what = f"the entry at {entry.position} orders records of {beyond}, which have ended"
            self._violations.append(Violation("sealed", what))

    def _compare(self, sequencer: Sequencer, who: str, start: int | None = None) -> None:
        """Compare a sequencer's last entries (or all) with what was committed."""
        known = len(self._entries)
        start = max(0, known - 64) if start is None else start
        start = max(start, sequencer._metalog.base.position)
        self._compare_base(sequencer, who)
        entries = sequencer._metalog.page(start, known)
        for position, entry in enumerate(entries, start):
            if encode_entry(entry) != self._entries[position]:
                what = f"{who} has another entry at {position} than was committed: {entry}"
                self._violations.append(Violation("metalog", what))
                return

    def _compare_base(self, sequencer: Sequencer, who: str) -> None:
        """Check that a base equals the sum of the committed entries below it."""
        base = sequencer._metalog.base
        if base.position > len(self._entries):
            return  # of what was not noted yet
        cut, trims = dict[ShardId, int](), 0
        before = [decode_entry(entry) for entry in self._entries[: base.position]]
        for entry in before:
            trims += isinstance(entry, Trim)
            for shard, count in entry.counts.items():
                cut[shard] = cut.get(shard, 0) + count
        last = before[-1].epoch if before else 0
        found = base.last, base.tail, dict(base.cut), base.trims
        if found != (last, self._tails[base.position], cut, trims):
            what = f"{who} has a base at {base.position} of {found}, not of {last, cut, trims}"
            self._violations.append(Violation("base", what))

    def finish(self, cluster: SimulatedCluster) -> list[int]:
        """Compare all sequencers' copies; return the tail after each position.

        The platform may still append, for retention policies. Nothing is noted during a sync.
        """
        primary = leading(cluster)
        assert primary is not None, "healed"
        home = home_of(cluster, primary)
        cluster.world.run_until(lambda: not home.holding, _SYNCED_WITHIN_S)
        self.note(cluster)
        for node in primary.sequencers:
            shell = cluster.process_of(node).shell
            assert shell is not None, "healed"
            sequencer = shell.roles[node]
            assert isinstance(sequencer, Sequencer)
            self._compare(sequencer, node, start=0)
        return self._tails

    def shard_of(self, cluster: SimulatedCluster) -> list[ShardId]:
        """Return the shard of each seqnum, from the committed entries."""
        self.note(cluster)
        shards: list[ShardId] = []
        for entry in map(decode_entry, self._entries):
            for shard in sorted(entry.counts):
                shards += [shard] * entry.counts[shard]
        return shards

    def ordered_at(self) -> list[float]:
        """Return when each seqnum was ordered, seconds since 1970, from the committed entries."""
        stamps: list[float] = []
        for entry in map(decode_entry, self._entries):
            if isinstance(entry, NewRecords):
                stamps += [entry.time_us / 1e6] * sum(entry.counts.values())
        return stamps
