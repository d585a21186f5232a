"""The faults of a simulation: one entry of `FAULTS` for each kind, drawn and timed by the seed.

A fault acts on the cluster. It returns the function that ends it, and the simulated seconds after
which this function is called. At the end of the run all remaining faults end at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Final, TypeAlias

from indilog.runtime.journal.checkpoint_files import KEPT, checkpoint_path, checkpoint_places
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_scan import headers_in
from indilog.runtime.journal.segment_use import newest_noted
from indilog.testing.simulation import LinkQuality, SimulatedCluster, SimulatedProcess
from tests.simulation.lost_storage import loses_storage

Undo: TypeAlias = Callable[[], None]
Fault: TypeAlias = Callable[["Chaos"], tuple[Undo, float] | None]


_LAGGING: Final = 0.4
"""The share of runs in which one process receives all messages late from the beginning (A20)."""


_RECENT_BYTES: Final = 300
_YEAR_S: Final = 366 * 86_400.0


class Chaos:
    """Injects faults at random instants.

    Attributes:
        injected: the number of faults of each kind.
    """

    def __init__(self, cluster: SimulatedCluster, kinds: tuple[str, ...], mean_s: float) -> None:
        self.cluster = cluster
        self.chance = cluster.world.chance("faults")
        self.injected: dict[str, int] = {}
        self.over = False
        self.taken_over: SimulatedProcess | None = None
        self._kinds = kinds
        self._mean_s = mean_s
        if kinds:
            self._next()
        if self.chance.random() < _LAGGING:
            cluster.network.slow[self.process().name] = self.chance.choice((0.005, 0.03, 0.1))

    def end(self) -> None:
        """Inject no more faults, and end those that last."""
        self.over = True
        self.retire()
        self.cluster.heal()

    def retire(self) -> None:
        """End the process that another one has replaced."""
        if (old := self.taken_over) is not None:
            self.taken_over = None
            processes = self.cluster.processes
            if old in processes and any(p is not old and p.nodes == old.nodes for p in processes):
                old.crash(power=True)
                self.cluster.remove_process(old)

    def _next(self) -> None:
        self.cluster.world.after(self.chance.expovariate(1 / self._mean_s), self._strike)

    def _strike(self) -> None:
        if self.over:
            return
        kind = self.chance.choice(self._kinds)
        if (effect := FAULTS[kind](self)) is not None:
            self.injected[kind] = self.injected.get(kind, 0) + 1
            self.cluster.world.tell(f"fault: {kind}")
            undo, after_s = effect
            self.cluster.world.after(after_s, self._undo, undo)
        self._next()

    def _undo(self, undo: Undo) -> None:
        if not self.over:
            undo()

    def damaged(self) -> SimulatedProcess | None:
        """Return the one process of this run whose disk may be damaged.

        It has storage nodes only, and at most one replica of each shard, so that other replicas
        have all of its records. None: there is no such process.
        """
        view = self.cluster.view
        for process in self.cluster.processes:
            kept = [shard for node in process.nodes for shard in view.shards_of(node)]
            alone = any(len(view.shards[shard].replicas) < 2 for shard in kept)
            only_storage = set(process.nodes) <= set(view.storage_nodes)
            if len(process.nodes) > 1 and loses_storage(self.cluster.config):
                continue  # a replacement may put a second replica of a shard there
            if only_storage and kept and not alone and len(set(kept)) == len(kept):
                return process
        return None

    def process(self) -> SimulatedProcess:
        """Choose a process."""
        return self.chance.choice(self.cluster.processes)

    def persisting(self) -> SimulatedProcess:
        """Choose a process that stores a part of the log."""
        view = self.cluster.view
        now = self.cluster.stored_view
        keepers = {*view.sequencers, *view.storage_nodes, *now.sequencers}
        keeping = [p for p in self.cluster.processes if keepers.intersection(p.nodes)]
        return self.chance.choice(keeping)

    def a_while_s(self) -> float:
        """Choose a duration, in simulated seconds."""
        return self.chance.choice((0.005, 0.05, 0.2, 0.8)) * self.chance.uniform(0.5, 1.5)


def crash(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process is killed, or its machine loses power; it is started again later."""
    process = chaos.process()
    process.crash(power=chaos.chance.random() < 0.6)
    return process.start, chaos.a_while_s()


def crash_all(chaos: Chaos) -> tuple[Undo, float] | None:
    """All processes end at once; they come back one by one."""
    power = chaos.chance.random() < 0.7
    processes = list(chaos.cluster.processes)
    for process in processes:
        process.crash(power=power)
    chaos.chance.shuffle(processes)
    for process in processes[1:]:
        chaos.cluster.world.after(chaos.a_while_s(), process.start)
    return processes[0].start, chaos.a_while_s()


def pause(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process is paused and resumed."""
    process = chaos.process()
    process.pause()
    return process.resume, chaos.a_while_s()


def split(chaos: Chaos) -> tuple[Undo, float] | None:
    """The network splits in two; sometimes only one way is cut."""
    names = [process.name for process in chaos.cluster.processes]
    if len(names) < 2:
        return None
    chaos.chance.shuffle(names)
    size = chaos.chance.randint(1, len(names) - 1)
    here, there = names[:size], names[size:]
    network = chaos.cluster.network
    network.cut(here, there)
    if chaos.chance.random() < 0.5:
        network.cut(there, here)
    return network.join, chaos.a_while_s()


def bad_network(chaos: Chaos) -> tuple[Undo, float] | None:
    """Frames are lost, late, repeated and out of order for a while."""
    chance, network = chaos.chance, chaos.cluster.network
    before = network.quality
    network.quality = dataclasses.replace(
        before,
        late=chance.choice((0.0, 0.1, 0.5)),
        late_s_max=chance.choice((0.002, 0.02, 0.2)),
        loss=chance.choice((0.0, 0.02, 0.2)),
        repeat=chance.choice((0.0, 0.1, 0.5)),
        reorder=chance.random() < 0.5,
    )

    def undo() -> None:
        network.quality = LinkQuality()

    return undo, chaos.a_while_s()


def slow_process(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process receives all messages late."""
    engines = [process for process in chaos.cluster.processes if process.logs]
    likely = engines if engines and chaos.chance.random() < 0.5 else chaos.cluster.processes
    slow, name = chaos.cluster.network.slow, chaos.chance.choice(likely).name
    slow[name] = chaos.chance.choice((0.002, 0.02, 0.1))

    def undo() -> None:
        slow.pop(name, None)

    return undo, chaos.a_while_s()


def sync_error(chaos: Chaos) -> tuple[Undo, float] | None:
    """The next sync of one process fails: it ends, and is started again."""
    overlapping = chaos.chance.random() < 0.4
    process = chaos.persisting() if overlapping else chaos.process()
    process.disk.sync_fails, process.disk.overlap_fails = True, overlapping
    lose_power_after_restart(chaos, process)

    def undo() -> None:
        process.disk.sync_fails = process.disk.overlap_fails = False
        process.start()

    # A second sync could overlap with the failed one only if the journal had a bug.
    return undo, 2.0 if overlapping else chaos.a_while_s()


def killed_in_sync(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process is killed during one of its next syncs, and restarted."""
    process = chaos.process()
    process.disk.syncs_until_killed = chaos.chance.randrange(4)
    lose_power_after_restart(chaos, process)

    def undo() -> None:
        process.disk.syncs_until_killed = None
        process.start()

    return undo, chaos.a_while_s()


def lose_power_after_restart(chaos: Chaos, process: SimulatedProcess) -> None:
    """In half of the cases, cut the power of the machine soon after the restart of the process.

    The page cache may have been the only place of what the process recovered.
    """
    world, starts = chaos.cluster.world, process.starts
    if chaos.chance.random() < 0.5:
        return
    after_s = chaos.chance.choice((0.0, 0.005, 0.05))

    def lose_power() -> None:
        if not chaos.over and process.up:
            process.crash(power=True)
            world.after(chaos.a_while_s(), process.start)

    def look(times: int) -> None:
        if process.starts > starts:
            world.after(after_s, lose_power)
        elif times:
            world.after(0.02, look, times - 1)

    look(50)


def disk_full(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process finds no room for a new file for a while."""
    process = chaos.process()
    process.disk.full = True

    def undo() -> None:
        process.disk.full = False
        process.start()

    return undo, chaos.a_while_s()


def twin_writer(chaos: Chaos) -> tuple[Undo, float] | None:
    """A compute node is paused, replaced by a new process, and resumed (a zombie)."""
    cluster = chaos.cluster
    alone = [p for p in cluster.processes if p.up and len(p.nodes) == 1 and p.logs]
    if not alone or chaos.taken_over is not None:
        return None
    old = chaos.chance.choice(alone)
    chaos.taken_over = old
    shard = cluster.view.shard_written_by(old.nodes[0])
    if shard is not None and chaos.chance.random() < 0.8:
        # Some replicas, or all, miss the last messages of the old process.
        replica = chaos.chance.choice(cluster.view.shards[shard].replicas)
        cluster.network.cut([old.name], [cluster.process_of(replica).name])

    def replace() -> None:
        if chaos.over or not old.up:
            return
        old.pause()
        old.replaced = True
        cluster.network.join()
        if chaos.chance.random() < 0.7:  # no replica notifies it of the newer writer
            storage = {cluster.process_of(node).name for node in cluster.view.storage_nodes}
            cluster.network.cut(sorted(storage), [old.name])
        twin = cluster.add_process(old.nodes)
        twin.on_up = old.on_up
        if twin.up:
            twin.on_up(twin)

    def undo() -> None:
        old.resume()
        cluster.world.after(chaos.a_while_s(), chaos.retire)

    cluster.world.after(chaos.chance.uniform(0.0, 0.06), replace)
    return undo, 0.06 + chaos.a_while_s()


def wrong_clock(chaos: Chaos) -> tuple[Undo, float] | None:
    """One process starts with a wall clock that is wrong by a year; its later starts are right."""
    process, chance = chaos.process(), chaos.chance
    begun = any(logs.engine.tail for p in chaos.cluster.processes for logs in p.logs.values())
    if not begun:
        return None  # the first records begin the log's time
    process.crash(power=False)
    process.wall_ahead_s = chance.choice((_YEAR_S, -_YEAR_S))

    def undo() -> None:
        process.start()
        process.wall_ahead_s = 0.0

    return undo, chaos.a_while_s()


def damaged_checkpoint(chaos: Chaos) -> tuple[Undo, float] | None:
    """One bit changes in the newest checkpoint of a process that has an older one, and it ends."""
    process, chance = chaos.process(), chaos.chance
    journal = process.disk.directory / "journal"
    places = checkpoint_places(journal)
    if len(places) < KEPT:
        return None
    path = checkpoint_path(journal, places[-1])
    offset = chance.randrange(path.stat().st_size)
    process.disk.flip_bit(f"journal/{path.name}", offset, chance.randrange(8))
    process.crash(power=chance.random() < 0.5)
    return process.start, chaos.a_while_s()


def flipped_bit(chaos: Chaos) -> tuple[Undo, float] | None:
    """One bit changes on the disk of one replica, anywhere in its written bytes."""
    process, chance = chaos.damaged(), chaos.chance
    if process is None:
        return None
    journal = process.disk.directory / "journal"
    names = sorted(path.name for path in journal.glob("segment-*.log"))
    if not names:
        return None
    recent = chance.random() < 0.5
    name = names[-1] if recent else chance.choice(names)
    written = len((journal / name).read_bytes().rstrip(b"\0"))
    if not written:
        return None
    if recent:  # no later frame calls these bytes synced, and writers ask for them soon
        offset = written - 1 - chance.randrange(min(written, _RECENT_BYTES))
        hit = [process, *(p for p in chaos.cluster.processes if p.logs)]
    else:
        offset = chance.randrange(written)
        hit = [process] if chance.random() < 0.5 else []
    process.disk.flip_bit(f"journal/{name}", offset, chance.randrange(8))
    for other in hit:
        other.crash(power=False)

    def undo() -> None:
        for other in (process, *hit):
            other.start()

    return undo, chaos.a_while_s()


def lost_tail(chaos: Chaos) -> tuple[Undo, float] | None:
    """One replica loses the newest frames that no other bytes on its disk declare synced. All
    shards then get new writers; in half of the cases before the replicas know what is ordered.

    The replica's disk had said that these frames were synced. It takes them for a torn tail.
    """
    process = chaos.damaged()
    if process is None:
        return None
    journal = process.disk.directory / "journal"
    if (noted := newest_noted(journal)) is None or not noted.number:
        return None
    path = segment_path(journal, noted.number)
    with path.open("rb") as file:
        frames = list(headers_in(file.fileno(), noted.number, 0))
    places = checkpoint_places(journal)
    synced = max(
        noted.synced,
        *(header.synced for _, header in frames),
        *(place.offset for place in places if place.segment == noted.number),
        0,
    )
    if not (newest := [offset for offset, _ in frames if offset >= synced]):
        return None
    cluster, view = chaos.cluster, chaos.cluster.view
    storage = {p.name: p for p in map(cluster.process_of, view.storage_nodes)}
    sequencers = {cluster.process_of(node).name for node in view.sequencers}
    hit = {p.name: p for p in cluster.processes if p.logs} | {process.name: process}
    if chaos.chance.random() < 0.5:  # they have ordering frames of older entries only
        cluster.network.cut(sorted(sequencers), sorted(storage))
        hit |= storage
    for other in hit.values():
        other.crash(power=False)
    zeros = bytes(path.stat().st_size - newest[0])
    process.disk.overwrite(f"journal/{path.name}", newest[0], zeros)

    def undo() -> None:
        for other in hit.values():
            other.start()
        cluster.world.after(chaos.a_while_s(), cluster.network.join)

    return undo, chaos.a_while_s()


def unreadable(chaos: Chaos) -> tuple[Undo, float] | None:
    """Some reads of the disk of one replica fail for a while."""
    process = chaos.damaged()
    if process is None:
        return None
    process.disk.unreadable = chaos.chance.choice((0.1, 1.0))

    def undo() -> None:
        process.disk.unreadable = 0.0

    return undo, chaos.a_while_s()


def wiped_disk(chaos: Chaos) -> tuple[Undo, float] | None:
    """One replica comes back with an empty disk."""
    process = chaos.damaged()
    if process is None:
        return None
    process.crash(power=True)
    process.disk.wipe()
    return process.start, chaos.a_while_s()


def wiped_under_writer(chaos: Chaos) -> tuple[Undo, float] | None:
    """One replica reports records that the other replicas lack, then loses its disk.

    The others get the records when the wiped replica is up again. Its writer, which still runs,
    cannot reach it.
    """
    process = chaos.damaged()
    if process is None:
        return None
    cluster, network = chaos.cluster, chaos.cluster.network
    storage = [cluster.process_of(node) for node in cluster.view.storage_nodes]
    others = sorted({p.name for p in storage if p is not process})
    engines = sorted({p.name for p in cluster.processes if p.logs and p.name not in others})
    if process.name in engines or not others:
        return None
    network.cut(engines, others)

    def wipe() -> None:
        if not chaos.over and process.up:
            process.crash(power=True)
            process.disk.wipe()
            network.join()
            network.cut(engines, [process.name])
            process.start()

    cluster.world.after(chaos.chance.uniform(0.02, 0.1), wipe)
    return network.join, 0.1 + chaos.a_while_s()


FAULTS: Final[dict[str, Fault]] = {
    "crash": crash,
    "crash_all": crash_all,
    "pause": pause,
    "split": split,
    "bad_network": bad_network,
    "slow_process": slow_process,
    "sync_error": sync_error,
    "killed_in_sync": killed_in_sync,
    "disk_full": disk_full,
    "twin_writer": twin_writer,
    "wrong_clock": wrong_clock,
    "flipped_bit": flipped_bit,
    "damaged_checkpoint": damaged_checkpoint,
    "unreadable": unreadable,
    "wiped_disk": wiped_disk,
    "wiped_under_writer": wiped_under_writer,
    "lost_tail": lost_tail,
}


def draw(chance: random.Random) -> tuple[tuple[str, ...], float]:
    """Draw which faults a run has, and how far apart they are on average, in seconds."""
    kinds = tuple(kind for kind in FAULTS if chance.random() < 0.4)
    return kinds, chance.choice((0.05, 0.15, 0.5))
