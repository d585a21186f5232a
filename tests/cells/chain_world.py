"""A simulated log over chains of storage nodes, on the simulated clock of `tests.cells.world`.

Questions and answers take random times, are lost and repeated. Storage nodes stop and start again,
and lose their disks; single processes lose the connection to single nodes. Processes crash. Two
keepers of the layout replace nodes, also those that only they do not reach.

A storage node never loses its disk if a chain has no other complete replica: then records would be
lost. What any client has seen of a cell is recorded, and compared with all that is seen later.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from indilog.base.errors import DataLossError
from indilog.base.ids import NodeId
from indilog.kernel.cell_layout import CellLayout, new_layout
from indilog.runtime.cell_store import CellStore
from indilog.wire.cell_messages import (
    CellAnswer,
    CellOutcome,
    CellQuestion,
    CellSection,
    CellsSeal,
)
from indilog_cells import core_events
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.layout_changes import Asks, LayoutChanges
from indilog_cells.state import Closed
from indilog_cells.stored_cells import StoredCells
from tests.cells.world import Process, World

FOLDER = "log"
NODES = [NodeId(f"storage-{n}") for n in range(4)]
COPIES = 2
ANSWER_US = 60_000
"""A question fails after so many microseconds."""
CHECK_US = 40_000
REPLACE_S = 0.12
UNDISTURBED_US = 300_000
"""So long after the end of a fault every change of the layout that it caused has ended."""


@dataclass
class Suspended:
    """What a coroutine waits for: `begin` is called with a function that takes the result."""

    begin: Callable[[Callable[[object], None]], None]

    def __await__(self) -> Generator[Suspended, object, Any]:
        return (yield self)


@dataclass
class Node:
    """A storage node."""

    store: CellStore = field(default_factory=lambda: CellStore(":memory:"))
    is_down: bool = False


class Net:
    """The connections of one client: a `CellNodes` and its `Layouts`."""

    def __init__(self, world: ChainWorld) -> None:
        self.world = world
        self.layout = world.layout
        self.unreachable: set[NodeId] = set()

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        answers: Sequence[CellAnswer | None] = await Suspended(partial(self._ask_all, asks))
        return answers

    def _ask_all(self, asks: Asks, take: Callable[[object], None]) -> None:
        answers: dict[int, CellAnswer | None] = {}

        def answered(at: int, answer: CellAnswer | None) -> None:
            if at not in answers and len(answers) < len(asks):
                answers[at] = answer
                if len(answers) == len(asks):
                    take([answers[n] for n in range(len(asks))])

        for at, (node, question) in enumerate(asks):
            for _ in range(2 if self.world.lost(0.03) else 1):
                self._send(node, question, partial(answered, at))
            self.world.after(ANSWER_US, partial(answered, at, None))

    async def ask_until(self, asks: Asks, heard: Callable[[int, CellAnswer | None], bool]) -> None:
        if asks:
            await Suspended(partial(self._ask_until, asks, heard))

    def _ask_until(
        self,
        asks: Asks,
        heard: Callable[[int, CellAnswer | None], bool],
        take: Callable[[object], None],
    ) -> None:
        left, ended = len(asks), False

        def answered(at: int, answer: CellAnswer | None) -> None:
            nonlocal left, ended
            left -= 1
            if (heard(at, answer) or not left) and not ended:
                ended = True
                take(None)

        self.tell(asks, answered)

    def tell(self, asks: Asks, heard: Callable[[int, CellAnswer | None], object]) -> None:
        for at, (node, question) in enumerate(asks):
            self._tell(node, question, partial(heard, at))

    def _tell(
        self, node: NodeId, question: CellQuestion, heard: Callable[[CellAnswer | None], object]
    ) -> None:
        done = False

        def answered(answer: CellAnswer | None) -> None:
            nonlocal done
            if not done:
                done = True
                heard(answer)

        for _ in range(2 if self.world.lost(0.03) else 1):
            self._send(node, question, answered)
        self.world.after(ANSWER_US, partial(answered, None))

    async def run_all(self, works: Sequence[Coroutine[Any, Any, object]]) -> None:
        await in_turn(works)

    async def pause(self, seconds: float) -> None:
        await Suspended(lambda take: self.world.after(int(seconds * 1e6), partial(take, None)))

    def _send(
        self, node: NodeId, question: CellQuestion, take: Callable[[CellAnswer], None]
    ) -> None:
        world = self.world

        def serve() -> None:
            if world.nodes[node].is_down or node in self.unreachable:
                return
            (answer,) = world.nodes[node].store.serve([question])
            if not world.lost(world.faults.answer_lost):
                world.after(world.delay_us(), partial(take, answer))

        if not world.lost(world.faults.request_lost):
            world.after(world.delay_us(), serve)

    async def renew(self) -> None:
        newest = await Suspended(lambda take: self.world.later(take, lambda: self.world.layout))
        if self.world.lost(0.05):
            raise CellsError("the catalog does not answer")
        self.layout = newest

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        def record() -> bool:
            if self.world.layout != before:
                return False
            self.world.layout = after
            return True

        done: bool = await Suspended(lambda take: self.world.later(take, record))
        if self.world.lost(0.05):
            raise CellsError("the outcome is unknown")
        await self.renew()
        return done


class Disks:
    """The disks of the storage nodes of a world: a `CellNodes`, also of nodes that are stopped."""

    def __init__(self, world: ChainWorld) -> None:
        self._world = world

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        return [self._ask(self._world.nodes[node].store, question) for node, question in asks]

    @staticmethod
    def _ask(store: CellStore, question: CellQuestion) -> CellAnswer:
        (answer,) = store.serve([msgspec.structs.replace(question, epoch=0)])
        if answer.outcome is CellOutcome.SEALED:
            (answer,) = store.serve([msgspec.structs.replace(question, epoch=answer.epoch)])
        return answer


def finished(work: Coroutine[Any, Any, bytes | None]) -> bytes | None:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        found: bytes | None = ended.value
        return found
    raise AssertionError("it waits")


class ChainWorld(World):
    """A run of one seed; see `World`."""

    def __init__(self, seed: int, **sizes: int) -> None:
        self.layout = self.first_layout()
        self.nodes = {node: Node() for node in NODES}
        for node, space in self.layout.replicas:
            self.nodes[node].store.serve([CellsSeal(0, space, 1, opens=True)])
        self.disturbed_us = 0
        """When a node was last stopped, or not reached by a keeper of the layout."""
        super().__init__(seed, **sizes)
        self.faults.crash_us = 2_000_000
        self.calm = self.random.choice([1, 2, 4])
        """A greater number: faults are rarer."""
        self.processes = [self.made_process(n) for n in range(len(self.processes))]
        self.keepers = [self.made_keeper() for _ in range(2)]
        self.disks_lost = 0
        for call in (self._stop_node, self._cut, *(keeper.begin for keeper in self.keepers)):
            self.after(self.random.randrange(1, 100_000), call)
        self.copies_made = 0
        self.copy_faults: list[str] = []
        self._copy_random = random.Random(seed)
        self.after(1, self._copy_later)

    def first_layout(self) -> CellLayout:
        """Return the layout of the new log."""
        return new_layout(FOLDER, NODES, COPIES)

    def made_process(self, number: int) -> Process:
        """Return a process."""
        return ChainProcess(self, number)

    def made_keeper(self) -> Keeper:
        """Return a process that checks the layout."""
        return Keeper(self)

    def delay_us(self) -> int:
        """Return how long a message takes: mostly little, sometimes much."""
        long = self.random.random() < 0.03
        return self.random.randrange(5_000, 80_000) if long else self.random.randrange(1, 2_000)

    def pause_us(self) -> int:
        """Return how long a caller waits: long enough for several faults in a run."""
        return self.random.randrange(1, 60_000)

    def later(self, take: Callable[[object], None], call: Callable[[], object]) -> None:
        """Call after one delay, and deliver the result after another."""
        delay_us = self.delay_us()
        self.after(self.delay_us(), lambda: self.after(delay_us, partial(take, call())))

    def start(
        self,
        work: Coroutine[Any, Any, Any],
        is_alive: Callable[[], bool],
        done: Callable[[object], None],
    ) -> None:
        """Run a coroutine while its process is alive; `done` takes its result or `CellsError`."""

        def step(value: object) -> None:
            if not is_alive():
                work.close()
                return
            try:
                waits_for = work.send(value)
            except StopIteration as ended:
                done(ended.value)
            except CellsError as error:
                done(error)
            else:
                waits_for.begin(step)

        step(None)

    # --- faults

    def _stop_node(self) -> None:
        if self.healed:
            return
        node = self.random.choice(NODES)
        if self.random.random() < 0.8 and self._may_lose(node):
            self.nodes[node].store = CellStore(":memory:")
            self.disks_lost += 1
        self.nodes[node].is_down = True
        self.disturbed_us = self.now_us + self.random.randrange(1, 300_000)
        self.after(self.disturbed_us - self.now_us, partial(self._start_node, node))
        self.after(self.calm * self.random.randrange(1, 500_000), self._stop_node)

    def _start_node(self, node: NodeId) -> None:
        self.nodes[node].is_down = False

    def _may_lose(self, node: NodeId) -> bool:
        """Whether each chain has a complete replica on another node that works, and no change of
        the layout can leave it out.
        """
        return self.now_us > self.disturbed_us + UNDISTURBED_US and all(
            any(
                not each.is_filling and each.node != node and self._has(each.node, each.space)
                for each in chain
            )
            for chain in self.layout.chains
        )

    def _has(self, node: NodeId, space: str) -> bool:
        return space in dict(rows(self.nodes[node].store, "SELECT name, id FROM spaces"))

    def _cut(self) -> None:
        if self.healed:
            return
        net = self.random.choice(self._nets())
        node = self.random.choice(NODES)
        net.unreachable.add(node)
        length_us = self.random.randrange(1, 500_000)
        self.disturbed_us = max(self.disturbed_us, self.now_us + length_us)
        self.after(length_us, lambda: net.unreachable.discard(node))
        self.after(self.calm * self.random.randrange(1, 400_000), self._cut)

    def heal(self) -> None:
        """End all faults."""
        self.healed = True
        for node in self.nodes.values():
            node.is_down = False
        for net in self._nets():
            net.unreachable.clear()

    def _nets(self) -> list[Net]:
        nets = [each.net for each in self.processes if isinstance(each, ChainProcess)]
        return nets + [keeper.net for keeper in self.keepers]

    # --- backups

    def _copy_later(self) -> None:
        """Read the layout now, and the disks some time later, as a backup does; repeatedly."""
        if self.healed:
            return
        layout, known = self.layout, list(self.store.first)
        delay_us = self._copy_random.choice([0, 1_000, 100_000])
        self.after(delay_us, partial(self._copy, layout, known))
        self.after(self._copy_random.randrange(1, 300_000), self._copy_later)

    def _copy(self, layout: CellLayout, known: Sequence[int]) -> None:
        """Observe what a backup has: at least all contents that were known before."""
        cells = StoredCells(Disks(self), layout)
        for position in range(max([*self.store.first, 0]) + 3):
            try:
                content = finished(cells.read(position))
            except DataLossError as error:
                if layout == self.layout:
                    self.copy_faults.append(f"a copy failed: {error}")
                return
            if content:
                self.observe(position, content)
            elif content is None and position in known:
                self.copy_faults.append(f"a copy lacks cell {position}")
        self.copies_made += 1

    # --- what is seen

    def observe(self, position: int, content: bytes) -> None:
        """Note a content that a client has read, or has written for certain."""
        if self.store.first.setdefault(position, content) != content:
            self.store.overwritten.append(position)

    def faults_at_end(self) -> list[str]:
        """Return what is wrong with the cells of the last layout, and complete `store.first`."""
        found = self.copy_faults[:]
        for chain_number, chain in enumerate(self.layout.chains):
            for replica in chain:
                if replica.is_filling:
                    continue
                has, floor = cells_of(self.nodes[replica.node].store, replica.space)
                for position in range(chain_number, max([*self.store.first, 0]) + 1):
                    if position % len(self.layout.chains) != chain_number or position < floor:
                        continue
                    if position in self.store.first:
                        if has.get(position) != self.store.first[position]:
                            found.append(f"{replica.node} lacks cell {position}, or has another")
                    elif replica == chain[-1] and position in has:
                        self.store.first[position] = has[position]
        return found


@dataclass
class ChainProcess(Process):
    """A process whose core uses chains."""

    net: Net = field(init=False)
    cells: ChainCells = field(init=False)

    def start(self) -> None:
        self.net = Net(self.chains)
        self.cells = self.made_cells()
        super().start()

    def made_cells(self) -> ChainCells:
        """Return the cells, for a new incarnation."""
        return ChainCells(self.net, self.net, part_bytes=1 << 20, new_part=new_part())

    @property
    def chains(self) -> ChainWorld:
        assert isinstance(self.world, ChainWorld)
        return self.world

    def _run(self, work: Coroutine[Any, Any, Any], done: Callable[[object], None]) -> None:
        own = self.incarnation
        self.chains.start(work, lambda: own == self.incarnation, done)

    def _request(self, position: int, run: Callable[[], core_events.Event], is_write: bool) -> None:
        assert isinstance(run, partial)
        content = run.args[1] if is_write else b""

        def done(result: object) -> None:
            if isinstance(result, CellsError):
                self._fail(position, is_write, result)
                return
            if is_write:
                if result:
                    self.chains.observe(position, content)
                took = core_events.CellWritten(position, content)
                self._deliver(took if result else core_events.CellTaken(position))
                return
            assert result is None or isinstance(result, bytes)
            if result:
                self.chains.observe(position, result)
            self._deliver(core_events.CellRead(position, result))

        cells = self.cells
        self._run(cells.write(position, content) if is_write else cells.read(position), done)

    def _fail(self, position: int, is_write: bool, _error: CellsError) -> None:
        self._deliver(core_events.CellFailed(position, is_write))

    def _note(self, complete: Closed) -> None:
        """Keep a generation and its checkpoint, then trim what the checkpoint does not need."""
        store = self.world.store
        if store.generations.setdefault(complete.info.start, complete.generation):
            store.checkpoints.setdefault(complete.info.end, complete.checkpoint)
        until = self.restored(store.checkpoints[complete.info.end]).generations[0].start
        if until:
            self._run(self.cells.trim(0, until), lambda _: None)


class Keeper:
    """Checks the layout periodically; crashes and begins again."""

    def __init__(self, world: ChainWorld) -> None:
        self.world = world
        self.incarnation = 0
        self.net = Net(world)

    def begin(self) -> None:
        """Begin again, with what is recorded."""
        self.incarnation += 1
        unreachable = self.net.unreachable
        self.net = Net(self.world)
        self.net.unreachable = unreachable
        self._upkeep = self.made_upkeep()
        if not self.world.healed:
            crash_us = self.world.random.randrange(1, 600_000)
            self.world.after(crash_us, partial(self._crash, self.incarnation))
        self._check(self.incarnation)

    def made_upkeep(self) -> ChainUpkeep[Any]:
        """Return the upkeep, for a new incarnation."""
        cells = ChainCells(self.net, self.net, part_bytes=1 << 20, new_part=new_part())
        changes = LayoutChanges(
            self.net, self.net, folder=FOLDER, copies=COPIES, available=lambda: NODES
        )
        return ChainUpkeep(
            cells,
            self.net,
            self.net,
            changes,
            in_turn,
            replace_after_s=REPLACE_S,
            clock=lambda: self.world.now_us / 1e6,
        )

    def _crash(self, own: int) -> None:
        if own == self.incarnation and not self.world.healed:
            self.incarnation += 1
            self.world.after(self.world.delay_us(), self.begin)

    def _check(self, own: int) -> None:
        if own != self.incarnation:
            return
        again = partial(self._check, own)
        self.world.start(
            self._upkeep.check(),
            lambda: own == self.incarnation,
            lambda _: self.world.after(CHECK_US, again),
        )


def new_part() -> Callable[[], int]:
    """Return a function that returns another number with each call."""
    numbers = iter(range(1, 1 << 62))
    return lambda: next(numbers)


async def in_turn(works: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run coroutines one after the other."""
    try:
        for work in works:
            await work
    finally:
        for work in works:
            work.close()


def rows(store: CellStore, query: str, *values: object) -> list[Any]:
    """Return the rows of the file of a store, without its code."""
    file = store._file
    assert isinstance(file, sqlite3.Connection)
    return file.execute(query, values).fetchall()


def cells_of(store: CellStore, space: str) -> tuple[dict[int, bytes], int]:
    """Return the contents of the cells of a space, and its floor."""
    found = rows(store, "SELECT id FROM spaces WHERE name = ?", space)
    if not found:
        return {}, 0
    (number,) = found[0]
    where = "FROM cells WHERE space = ? AND section = ?"
    cells = rows(store, f"SELECT position, content {where}", number, CellSection.RECORDS)
    floors = rows(
        store, "SELECT floor FROM floors WHERE space = ? AND section = ?", number,
        CellSection.RECORDS,
    )  # fmt: skip
    return dict(cells), floors[0][0] if floors else 0
