"""A simulated cell store, a sequencer and processes, on a simulated clock: one seed, one history.

Requests take random times. A request or its answer may be lost, so the client sees a failure whose
effect it does not know. Processes crash and begin again; the sequencer crashes, and the new one
begins at cell 0. Nothing here uses the code under test except its core.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, assert_never

from indilog.base.ids import tag_columns
from indilog_cells import core_events
from indilog_cells.content import Condition, Item, Records, TrimBelow
from indilog_cells.core import Core, CoreLimits
from indilog_cells.index import GenerationLimits
from indilog_cells.sequencer import TokenSequencer
from indilog_cells.state import Closed, LogState, Outcome

LOG = "log"
TAG = "t"
_COLUMNS = tag_columns(LOG, (TAG,))
LOG_HASH, TAG_HASH = (
    int.from_bytes(_COLUMNS.tags[n : n + 8], "little") for n in range(0, len(_COLUMNS.tags), 8)
)


LIMITS = GenerationLimits(cells=6)
"""Generations are closed early, so that checkpoints, trims and late processes meet."""


class Store:
    """The cells, and what was first written into each of them."""

    def __init__(self) -> None:
        self.cells: dict[int, bytes] = {}
        self.first: dict[int, bytes] = {}
        self.overwritten: list[int] = []
        self.generations: dict[int, bytes] = {}
        self.checkpoints: dict[int, bytes] = {}

    def write(self, position: int, content: bytes) -> bool:
        """Write a cell unless it is taken."""
        if position in self.cells:
            return False
        self._put(position, content)
        return True

    def trim(self, position: int) -> None:
        """Empty a cell."""
        self.cells[position] = b""

    def _put(self, position: int, content: bytes) -> None:
        if position in self.first and self.first[position] != content:
            self.overwritten.append(position)
        self.first.setdefault(position, content)
        self.cells[position] = content


class Known(NamedTuple):
    """How many cells a process had applied, and the tail."""

    position: int
    tail: int


@dataclass
class Done:
    """An operation of the history.

    Attributes:
        kind: `append`, `append if`, `trim` or `read`.
        data: of the record.
        known: of the condition.
        begun, ended: simulated times; `ended` is None if the outcome is unknown.
        outcome: of the item; of a read, what its process knew then.
    """

    kind: str
    process: int
    begun: int
    data: bytes = b""
    known: int = -1
    ended: int | None = None
    outcome: Outcome | Known | None = None


@dataclass
class Faults:
    """How often things fail, as probabilities."""

    request_lost: float = 0.02
    answer_lost: float = 0.02
    token_lost: float = 0.05
    crash_us: int = 400_000
    sequencer_crash_us: int = 300_000


class World:
    """A run of one seed.

    Args:
        seed: seed.
        processes: how many processes append and read.
        operations: how many operations are begun.
    """

    def __init__(self, seed: int, *, processes: int = 3, operations: int = 60) -> None:
        self.random = random.Random(seed)
        self.faults = Faults()
        if self.random.random() < 0.2:
            self.faults = Faults(0.0, 0.0, 0.0)
        self.now_us = 0
        self.store = Store()
        self.sequencer = TokenSequencer()
        self.history: list[Done] = []
        self.operations = operations
        self.healed = False
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.processes = [Process(self, n) for n in range(processes)]

    def after(self, delay_us: int, call: Callable[[], None]) -> None:
        """Call later."""
        self._number += 1
        heapq.heappush(self._events, (self.now_us + delay_us, self._number, call))

    def delay_us(self) -> int:
        """Return how long a message takes: mostly little, sometimes much."""
        long = self.random.random() < 0.1
        return self.random.randrange(20_000, 300_000) if long else self.random.randrange(1, 5_000)

    def pause_us(self) -> int:
        """Return how long a caller waits between two operations."""
        return self.delay_us()

    def lost(self, share: float) -> bool:
        """Whether a message is lost."""
        return not self.healed and self.random.random() < share

    def run(self, until_us: int = 60_000_000) -> None:
        """Run all operations, then without faults until all have ended."""
        for process in self.processes:
            process.start()
        self.after(self.faults.sequencer_crash_us, self._crash_sequencer)
        while self._events and self.now_us < until_us:
            self.now_us, _, call = heapq.heappop(self._events)
            call()
            if self.operations <= 0:
                self.heal()
                if all(process.is_idle for process in self.processes):
                    return
        raise AssertionError("operations do not end although nothing fails any more")

    def heal(self) -> None:
        """End all faults."""
        self.healed = True

    def _crash_sequencer(self) -> None:
        if self.healed:
            return
        self.sequencer = TokenSequencer()
        delay_us = self.random.randrange(1, 2 * self.faults.sequencer_crash_us)
        self.after(delay_us, self._crash_sequencer)


@dataclass
class Process:
    """A process with a core and one caller."""

    world: World
    number: int
    incarnation: int = 0
    tickets: int = 0
    pending: dict[int, Done] = field(default_factory=dict)
    is_idle: bool = False
    token_after_us: int = 30_000
    core: Core = field(init=False)

    def start(self) -> None:
        """Begin with the newest checkpoint, or from the first cell."""
        checkpoints = self.world.store.checkpoints
        state = self.restored(checkpoints[max(checkpoints)]) if checkpoints else LogState(LIMITS)
        limits = CoreLimits(
            cells_in_flight=self.world.random.choice([1, 2, 4]),
            read_ahead=self.world.random.choice([1, 2, 8]),
            fill_after_us=50_000,
            token_after_us=self.token_after_us,
        )
        self.incarnation += 1
        self.core = Core(state, b"%d.%d" % (self.number, self.incarnation), limits)
        own = self.incarnation
        if self.incarnation > 1 or self.number:
            crash_us = self.world.random.randrange(1, 2 * self.world.faults.crash_us)
            self.world.after(crash_us, lambda: self._crash(own))
        for _ in range(self.world.random.choice([1, 2, 4])):
            self._next_operation(own)

    @staticmethod
    def restored(checkpoint: bytes) -> LogState:
        """Return the state of a checkpoint."""
        return LogState.restored(checkpoint, LIMITS)

    def _crash(self, own: int) -> None:
        if own != self.incarnation or self.world.healed:
            return
        self.pending.clear()  # their outcomes stay unknown
        self.incarnation += 1
        self.world.after(self.world.delay_us(), self.start)

    def _next_operation(self, own: int) -> None:
        if own != self.incarnation:
            return
        if self.world.operations <= 0:
            self.is_idle = not self.pending
            return
        self.world.operations -= 1
        self.is_idle = False
        self.tickets += 1
        ticket, chosen = self.tickets, self.world.random.random()
        done = Done("read", self.number, self.world.now_us)
        if chosen < 0.3:
            self.core.catch_up(ticket)
        else:
            self.core.submit(ticket, self._item(done, chosen))
        self.world.history.append(done)
        self.pending[ticket] = done
        self._handle([])

    def _item(self, done: Done, chosen: float) -> Item:
        state = self.core.state
        if chosen < 0.4:
            done.kind = "trim"
            until = self.world.random.randrange(state.tail + 1)
            return TrimBelow(LOG_HASH, None, until)
        done.data = b"%d/%d/%d" % (self.number, self.incarnation, self.tickets)
        after = None
        if chosen < 0.6:
            done.kind = "append if"
            seqnums = state.open.seqnums(TAG_HASH)
            done.known = seqnums[-1] if seqnums else state.tail - 1
            after = Condition(LOG_HASH, TAG_HASH, done.known, state.tail)
        else:
            done.kind = "append"
        return Records(0, [_COLUMNS.tags], [_COLUMNS.names], [done.data], after)

    def _handle(self, events: list[core_events.Event]) -> None:
        core = self.core
        core.stamp_us = max(core.stamp_us, self.world.now_us)
        effects = core.handle(events, self.world.now_us)
        core.check_invariants()
        self._perform(effects)
        if (deadline_us := core.deadline_us()) is not None:
            own = self.incarnation
            delay_us = max(1, deadline_us - self.world.now_us)
            self.world.after(delay_us, lambda: self._wake(own))

    def _wake(self, own: int) -> None:
        due_us = self.core.deadline_us()
        if own == self.incarnation and due_us is not None and due_us <= self.world.now_us:
            self._handle([])

    def _deliver(self, event: core_events.Event) -> None:
        own = self.incarnation

        def deliver() -> None:
            if own == self.incarnation:
                self._handle([event])

        self.world.after(self.world.delay_us(), deliver)

    def _perform(  # noqa: C901 - one case an effect
        self, effects: list[core_events.Effect]
    ) -> None:
        for effect in effects:
            match effect:
                case core_events.AskToken(at_least):
                    self._ask_token(at_least)
                case core_events.WriteCell(position, content):
                    self._request(position, partial(self._write, position, content), True)
                case core_events.ReadCell(position):
                    self._request(position, partial(self._read, position), False)
                case core_events.ItemApplied(ticket, outcome):
                    self._end(ticket, outcome)
                case core_events.CaughtUp(ticket):
                    self._end(ticket, Known(self.core.state.position, self.core.state.tail))
                case core_events.FellBehind():
                    checkpoints = self.world.store.checkpoints
                    newest = self.restored(checkpoints[max(checkpoints)])
                    assert newest.position > self.core.state.position, "trimmed, and no checkpoint"
                    self._perform(self.core.restart(newest, self.world.now_us))
                case Closed():
                    self._note(effect)
                case core_events.SendContent():
                    self._send_content(effect)
                case core_events.ContentApplied():
                    self._answer_content(effect)
                case unreachable:
                    assert_never(unreachable)

    def _send_content(self, _effect: core_events.SendContent) -> None:
        raise AssertionError("the log has no owner")

    def _answer_content(self, _effect: core_events.ContentApplied) -> None:
        raise AssertionError("the log has no owner")

    @property
    def sequencer(self) -> TokenSequencer:
        """The sequencer that gives cells to this process."""
        return self.world.sequencer

    def _ask_token(self, at_least: int) -> None:
        own = self.incarnation

        def give() -> None:
            token = core_events.TokenGiven(self.sequencer.take(at_least))
            if own == self.incarnation:
                self._deliver(token)

        if not self.world.lost(self.world.faults.token_lost):
            self.world.after(self.world.delay_us(), give)

    def _request(self, position: int, run: Callable[[], core_events.Event], is_write: bool) -> None:
        failed = core_events.CellFailed(position, is_write)
        if self.world.lost(self.world.faults.request_lost):
            self._deliver(failed)
            return
        own = self.incarnation
        loses_answer = self.world.lost(self.world.faults.answer_lost)

        def serve() -> None:
            answer = run()  # also if the process has crashed meanwhile
            if own == self.incarnation:
                self._deliver(failed if loses_answer else answer)

        if loses_answer and self.world.random.random() < 0.5:
            self._deliver(failed)  # before the request takes effect
            loses_answer = False
            self.world.after(self.world.delay_us() * 4, lambda: (run(), None)[1])
            return
        self.world.after(self.world.delay_us(), serve)

    def _write(self, position: int, content: bytes) -> core_events.Event:
        took = self.world.store.write(position, content)
        return (
            core_events.CellWritten(position, content) if took else core_events.CellTaken(position)
        )

    def _read(self, position: int) -> core_events.Event:
        return core_events.CellRead(position, self.world.store.cells.get(position))

    def _note(self, complete: Closed) -> None:
        """Keep a generation and its checkpoint, then trim what the checkpoint does not need."""
        store = self.world.store
        if store.generations.setdefault(complete.info.start, complete.generation):
            store.checkpoints.setdefault(complete.info.end, complete.checkpoint)
        infos = self.restored(store.checkpoints[complete.info.end]).generations
        for position in range(infos[0].start):
            if store.cells[position]:
                store.trim(position)

    def _end(self, ticket: int, outcome: Outcome | Known | None) -> None:
        done = self.pending.pop(ticket)
        if outcome is not None:
            done.ended, done.outcome = self.world.now_us, outcome
        own = self.incarnation
        self.world.after(self.world.pause_us(), lambda: self._next_operation(own))
