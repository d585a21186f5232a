"""The callers of a simulation: sessions, each with a stream of random operations.

A session uses one engine. When the process of that engine ends, the session continues with its
position at any other engine. Its operations come from `operations`.
"""

from __future__ import annotations

import asyncio
import random

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConditionFailedError,
    DataLossError,
    IndilogError,
    TrimmedError,
)
from indilog.base.ids import NodeId
from indilog.base.log import Log, LogSource, Session
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess
from indilog_compute.local_log import LocalLogs
from tests.simulation.history import APPENDS, Operation
from tests.simulation.operations import OPERATIONS, Habits
from tests.support.link_pair import linked_logs

_OVERLAPPING_MAX = 12
_CALLERS_MAX = 12
_WITHOUT_POLICIES = 0.7
"""The share of runs without retention policies."""
_OVER_LINKS = 0.5
"""The share of sessions that reach their engine over a link."""
_MOVES = 0.6
"""The probability that a roaming session moves to another engine after a call."""


class Caller:
    """One session.

    Attributes:
        overlapping: whether it makes a call before the previous one has returned.
        over_link: whether it uses the logs over a link, as a worker or client does.
        roaming: whether it sometimes moves to another engine, with its position.
        think_s: its average pause between calls, in seconds.
    """

    def __init__(self, workload: Workload, number: int, *, overlapping: bool) -> None:
        self.workload = workload
        self.number = number
        self.overlapping = overlapping
        self.over_link = workload.cluster.world.chance(f"l{number}").random() < _OVER_LINKS
        self.roaming = (
            not overlapping and workload.cluster.world.chance(f"r{number}").random() < 0.5
        )
        self.session = Session()
        self.chance = workload.cluster.world.chance(f"session {number}")
        self.think_s = self.chance.choice((0.0, 0.002, 0.01, 0.03))
        self.engine = ""
        self.home: tuple[SimulatedProcess, int] | None = None
        self.at_work = 0

    @property
    def is_attached(self) -> bool:
        """Whether the incarnation of the process in which the session runs is still up."""
        return self.home is not None and self.home[0].up and self.home[0].starts == self.home[1]

    async def live(self, engine: str, logs: LocalLogs) -> None:
        """Perform operations at an engine until the workload is complete or the process ends."""
        self.engine = engine
        waiter = logs.future()
        logs.engine.when_ready(waiter)
        logs.wake()
        await waiter
        source = self._linked(logs) if self.over_link else logs
        while self.workload.wants_more():
            operation = self._draw()
            log = source.log(operation.log, self.session)
            if self.overlapping and self.at_work < _OVERLAPPING_MAX:
                asyncio.get_running_loop().create_task(self._do(operation, log))
            else:
                await self._do(operation, log)
            await asyncio.sleep(self.chance.expovariate(1.0) * self.think_s)
            if self.roaming and self.chance.random() < _MOVES:
                self.workload.move(self, self.chance)
                return

    def _linked(self, logs: LocalLogs) -> LogSource:
        """Return the logs of an engine over a link of this session, with a random delay."""
        delay_s = self.chance.choice((0.0, 0.00001, 0.0003))
        return linked_logs(logs, delay_s=lambda: self.chance.random() * delay_s)

    def _draw(self) -> Operation:
        workload, chance = self.workload, self.chance
        operation = workload.begin(self, chance.choice(workload.habits.logs))
        operation.kind = chance.choices(workload.kinds, workload.weights)[0]
        OPERATIONS[operation.kind].draw(workload.habits, chance, operation)
        return operation

    async def _do(self, operation: Operation, log: Log) -> None:
        self.at_work += 1
        try:
            await self.workload.perform(operation, log, self.session)
        finally:
            self.at_work -= 1


class Workload:
    """All sessions of a run, and the history that they write.

    Attributes:
        history: every operation, in the order of invocation.
        errors: exceptions that no guarantee allows: bugs.
    """

    def __init__(
        self, cluster: SimulatedCluster, chance: random.Random, *, operations: int, sessions: int
    ) -> None:
        self.cluster = cluster
        self.history: list[Operation] = []
        self.errors: list[BaseException] = []
        self.stopped = False
        self._operations = operations
        self.kinds = tuple(OPERATIONS)
        share = {"append": chance.uniform(0.5, 3.0), "trim": chance.choice((0.0, 1.0, 3.0))}
        if chance.random() < _WITHOUT_POLICIES:
            share |= {"set_retention": 0.0, "retention": 0.0}
        self.weights = [kind.weight * share.get(name, 1.0) for name, kind in OPERATIONS.items()]
        self.habits = Habits(cluster, chance, self.history)
        self.callers = [
            Caller(self, number, overlapping=chance.random() < 0.3) for number in range(sessions)
        ]

    def wants_more(self) -> bool:
        """Return whether further operations are wanted."""
        return not self.stopped and len(self.history) < self._operations

    def attach(self, process: SimulatedProcess) -> None:
        """Start callers at the engines of a process, now and after each of its restarts."""
        process.on_up = self._resume
        if process.up:
            self._resume(process)

    def _resume(self, process: SimulatedProcess) -> None:
        """Let sessions without a running engine continue at the engines of a process."""
        engines = self.cluster.view.engines
        for node in process.logs:
            mine = [c for c in self.callers if engines[c.number % len(engines)] == node]
            detached = [caller for caller in mine if not caller.is_attached]
            if not detached and len(self.callers) < _CALLERS_MAX:
                # All its sessions run in the process that this one replaces: add one.
                detached = [Caller(self, len(self.callers), overlapping=True)]
                self.callers += detached
            for caller in detached:
                self._attach_caller(caller, process, node)

    def move_detached(self, chance: random.Random) -> None:
        """Move some sessions whose engine died to other engines."""
        for caller in self.callers:
            if not caller.is_attached and chance.random() < 0.2:
                self.move(caller, chance)

    def move(self, caller: Caller, chance: random.Random) -> None:
        """Move a session to another engine that is up, or to the same one if there is no other."""
        homes = [(p, node) for p in self.cluster.processes if p.up for node in p.logs]
        homes = [home for home in homes if home[1] != caller.engine] or homes
        if homes:
            self._attach_caller(caller, *chance.choice(homes))

    def _attach_caller(self, caller: Caller, process: SimulatedProcess, node: NodeId) -> None:
        caller.home = (process, process.starts)
        caller.at_work = 0
        self.cluster.call(process, lambda: caller.live(node, process.logs[node]))

    # --- operations

    def begin(self, caller: Caller, log: str) -> Operation:
        """Add an operation to the history and return it."""
        operation = Operation(
            len(self.history), caller.number, caller.engine, "", log, overlapping=caller.overlapping
        )
        self.history.append(operation)
        return operation

    async def perform(self, operation: Operation, log: Log, session: Session) -> None:
        """Make the call of an operation and note its outcome."""
        world = self.cluster.world
        operation.invoked, operation.invoked_s = world.steps, world.now_s
        operation.position_before = operation.position_after = session.position
        try:
            operation.value = await OPERATIONS[operation.kind].perform(log, operation)
            operation.outcome = "ok"
        except AppendOutcomeUnknownError as error:
            operation.note = f"{type(error).__name__}: {error}"
        except TrimmedError as error:
            operation.outcome, operation.value = "trimmed", error.first_seqnum
            if operation.kind in APPENDS:
                operation.outcome, operation.note = "failed", str(error)
        except ValueError as error:  # beyond the tail, says `trim`
            operation.outcome, operation.note = "failed", str(error)
        except IndilogError as error:
            operation.outcome = "failed"
            if isinstance(error, ConditionFailedError):
                operation.value = error.last_seqnum
            if isinstance(error, DataLossError) and operation.kind not in APPENDS:
                operation.outcome, operation.value = "lost", (error.seqnum, error.next_seqnum)
            if operation.kind == "trim":  # a process that ends may have asked for it already
                operation.outcome = "unknown"
            operation.note = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 any other exception is a fault of the code
            self.errors.append(error)
            operation.note = repr(error)
        operation.position_after = session.position
        operation.returned, operation.returned_s = world.steps, world.now_s
        world.tell(operation.describe())
