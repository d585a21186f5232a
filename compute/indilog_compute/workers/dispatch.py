"""Decides which worker runs which call, without I/O.

A call goes to the worker with the fewest running calls. If no slot is free, the call waits. Waiting
applications are served round robin; the calls of one application start in their order. A suspended
worker gets no new calls. `CallRouter` calls `Dispatcher` and sends the calls.

A call made by a running call (a nested call) never waits: the running call holds a slot until the
nested call has ended, so waiting could deadlock. Nested calls need no slot, and have a separate
limit.

One application cannot starve another one (docs/decisions/0033). While several applications are
deployed, each may use only a fraction of the slots that the other applications do not use, and of
the pending calls that they leave. So an application that uses its whole share still leaves room for
the others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from indilog.base.errors import NotReadyError, OverloadedError
from indilog_compute.shares import limit_of_one


class Admitted(Hashable, Protocol):
    """The attributes of a call that the dispatcher needs."""

    @property
    def application(self) -> str:
        """The name of the call's application."""

    @property
    def is_nested(self) -> bool:
        """Whether a running call made this call."""


CallT = TypeVar("CallT", bound=Admitted)
WorkerT = TypeVar("WorkerT", bound=Hashable)


class Shares(NamedTuple):
    """The shares that each application may use while several are deployed, between 0 and 1.

    Attributes:
        slots: the part of the slots that no other application uses.
        pending: the part of the limit on pending calls that the other applications do not use.
    """

    slots: float
    pending: float


class _Application:
    """The calls of one application: how many hold a slot, how many are nested, and which wait."""

    __slots__ = ("nested", "slots", "waiting")

    def __init__(self) -> None:
        self.slots = 0
        self.nested = 0
        self.waiting: OrderedDict[Any, None] = OrderedDict()

    @property
    def pending(self) -> int:
        """Number of calls that hold a slot or wait for a slot."""
        return self.slots + len(self.waiting)


class _WorkerCalls:
    """The calls of one worker: how many hold a slot (`slots`), how many run (`load`), and how many
    run of each kind (application, and whether the call is nested).
    """

    __slots__ = ("kinds", "load", "slots")

    def __init__(self) -> None:
        self.slots = 0
        self.load = 0
        self.kinds: Counter[tuple[str, bool]] = Counter()


class Dispatcher(Generic[WorkerT, CallT]):
    """Admission and placement of calls.

    Args:
        worker_calls_max: number of slots of a worker, which limits its concurrent calls. Nested
            calls need no slot.
        calls_max: largest number of calls that wait or run. In addition, the same number of nested
            calls may run.
        shares: the shares of each application.
        is_shared: whether several applications are deployed; `set_shared` changes it.
    """

    def __init__(
        self,
        *,
        worker_calls_max: int,
        calls_max: int,
        shares: Shares,
        is_shared: bool,
    ) -> None:
        self._worker_calls_max = worker_calls_max
        self._calls_max = calls_max
        self._shares = shares
        self._is_shared = is_shared
        self._workers: dict[WorkerT, _WorkerCalls] = {}
        self._suspended: set[WorkerT] = set()
        self._applications: dict[str, _Application] = {}
        """Applications with calls that wait or run."""
        self._queues: OrderedDict[str, _Application] = OrderedDict()
        """Applications with waiting calls; the application that is served next comes first."""
        self._slots_used = self._nested = self._waiting = 0

    @property
    def running(self) -> int:
        """Number of running calls."""
        return self._slots_used + self._nested

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return self._waiting

    @property
    def workers(self) -> int:
        """Number of workers that take calls."""
        return len(self._workers)

    @property
    def load(self) -> tuple[int, int]:
        """The number of calls that hold a slot or wait for a slot, and the number of slots of all
        workers that take calls.
        """
        taking = len(self._workers) - len(self._suspended)
        return self._slots_used + self._waiting, taking * self._worker_calls_max

    def free_slots(self, name: str) -> int:
        """Return how many calls of an application would start at once."""
        if name in self._queues:
            return 0
        free = sum(
            max(0, self._worker_calls_max - counted.slots)
            for worker, counted in self._workers.items()
            if worker not in self._suspended
        )
        if not self._is_shared:
            return free
        application = self._applications.get(name)
        own = application.slots if application is not None else 0
        return min(free, max(0, self._slots_of_one(own) - own))

    @property
    def least_loaded(self) -> WorkerT | None:
        """The worker with the fewest calls of those that are not suspended; None: there is none."""
        worker = min(self._workers, key=self._load, default=None)
        return worker if worker not in self._suspended else None

    def admit(self, call: CallT) -> WorkerT | None:
        """Accept a call. Return the worker that runs the call now; None: the call waits for a slot.

        Raises:
            OverloadedError: a limit is reached; the call was not accepted.
            NotReadyError: the call is nested, so it cannot wait, and there is no worker.
        """
        self._check_room(call)
        if call.is_nested:
            worker: WorkerT | None = self._worker_of_nested()
        else:
            may_start = call.application not in self._queues and self._may_start(call.application)
            worker = self._free_worker() if may_start else None
        if worker is not None:
            self._start(call, worker)
        else:
            self._enqueue(call)
        return worker

    def put_back(
        self, calls: Sequence[CallT], worker: WorkerT | None = None
    ) -> list[tuple[CallT, WorkerT]]:
        """Queue admitted calls again that never began. Return the calls that start now, which may
        also be other calls.

        No limit applies to `calls`. They are queued in their order, before all waiting calls of
        their applications. They are removed from `worker` before any call starts, so no later call
        of an application overtakes them. If the worker was removed, or `finished` has already
        counted the calls, the caller passes None as `worker`.

        Raises:
            NotReadyError: one of the calls is nested, so it cannot wait, and there is no worker;
                nothing is done.
        """
        started: list[tuple[CallT, WorkerT]] = []
        if any(call.is_nested for call in calls):
            self._worker_of_nested()
        if worker is not None:
            for call in calls:
                self._count_out(worker, call)
        for call in reversed(calls):
            if call.is_nested:
                placed = call, self._worker_of_nested()
                self._start(*placed)
                started.append(placed)
            else:
                self._enqueue(call)
                self._queues[call.application].waiting.move_to_end(call, last=False)
        return started + self._fill()

    def withdraw_all(self) -> list[CallT]:
        """Remove and return all waiting calls."""
        waiting: list[CallT] = [call for app in self._queues.values() for call in app.waiting]
        for call in waiting:
            self._drop(call)
        return waiting

    def is_suspended(self, worker: WorkerT) -> bool:
        """Whether `worker` is suspended."""
        return worker in self._suspended

    def withdraw(self, call: CallT) -> bool:
        """Remove a call from the waiting calls; return whether it was waiting."""
        application = self._queues.get(call.application)
        if application is None or call not in application.waiting:
            return False
        self._drop(call)
        return True

    def finished(self, worker: WorkerT, call: CallT) -> list[tuple[CallT, WorkerT]]:
        """Count the end of a call; return the calls that start now, each with its worker.

        If `worker` was removed, `remove` has already subtracted its calls, so the counts do not
        change.
        """
        self._count_out(worker, call)
        return self._fill() if self._waiting else []

    def add(self, worker: WorkerT) -> list[tuple[CallT, WorkerT]]:
        """Add a worker; return the calls that start now."""
        assert worker not in self._workers, "a worker is added once"
        self._workers[worker] = _WorkerCalls()
        return self._fill()

    def suspend(self, worker: WorkerT) -> None:
        """Start no further calls in `worker` until `resume`. If all workers are suspended, nested
        calls still start.
        """
        if worker in self._workers:
            self._suspended.add(worker)

    def resume(self, worker: WorkerT) -> list[tuple[CallT, WorkerT]]:
        """Let `worker` take calls again; return the calls that start now."""
        self._suspended.discard(worker)
        return self._fill()

    def remove(self, worker: WorkerT) -> list[tuple[CallT, WorkerT]]:
        """Remove a lost worker with its running calls; return the calls that start now.

        The removed calls no longer count in the shares of their applications.
        """
        self._suspended.discard(worker)
        if (gone := self._workers.pop(worker, None)) is not None:
            for (application, is_nested), count in gone.kinds.items():
                if count:
                    self._end(application, is_nested, count)
        return self._fill()

    def set_shared(self, *, is_shared: bool) -> list[tuple[CallT, WorkerT]]:
        """Set whether several applications are deployed; return the calls that start now.

        The shares do not limit a single application.
        """
        self._is_shared = is_shared
        return self._fill()

    def check_invariants(self) -> None:
        """Check that the counts are consistent, and that no call waits although it could run."""
        running: Counter[tuple[str, bool]] = Counter()
        for worker in self._workers.values():
            assert worker.load == worker.kinds.total(), (
                "a worker's load is the sum of its kinds of calls"
            )
            running.update(worker.kinds)
        counted = {(name, False): app.slots for name, app in self._applications.items()}
        counted |= {(name, True): app.nested for name, app in self._applications.items()}
        assert +running == +Counter(counted), "running calls are counted by worker and application"
        assert self.running == running.total(), "the total is the sum of the workers"
        waiting = {n: app for n, app in self._applications.items() if app.waiting}
        assert dict(self._queues) == waiting, "the queues are those of the waiting applications"
        assert self._waiting == sum(len(app.waiting) for app in waiting.values())
        assert self._next() is None, "no call waits that could run"

    # --- internal

    def _check_room(self, call: CallT) -> None:
        application = self._applications.get(call.application)
        if call.is_nested:
            pending, own = self._nested, application.nested if application else 0
        else:
            pending = self._slots_used + self._waiting
            own = application.pending if application else 0
        if pending >= self._calls_max:
            raise OverloadedError(
                f"{pending:,} calls run or wait on this node, which is the limit "
                "(calls_pending_max); try again later."
            )
        if not self._is_shared:
            return
        if own >= limit_of_one(
            self._shares.pending, self._calls_max, pending - own, is_shared=True
        ):
            raise OverloadedError(
                f"{own:,} calls of app {call.application} run or wait on this node, the most "
                "that one of several applications may have "
                "(app_pending_share_max of calls_pending_max); try again later."
            )

    def _worker_of_nested(self) -> WorkerT:
        """Return the worker with the fewest running calls; a suspended worker only if all workers
        are suspended.

        Raises:
            NotReadyError: there is no worker.
        """
        if (worker := min(self._workers, key=self._load, default=None)) is None:
            raise NotReadyError("No function worker is up at the moment; try again.")
        return worker

    def _enqueue(self, call: CallT) -> None:
        """Queue `call` as the last call of its application."""
        application = self._queues[call.application] = self._application(call.application)
        application.waiting[call] = None
        self._waiting += 1

    def _count_out(self, worker: WorkerT, call: CallT) -> None:
        """Subtract `call` from the counts of `worker`, unless `remove` has subtracted all calls of
        the worker.
        """
        if (counted := self._workers.get(worker)) is None:
            return
        kind = call.application, call.is_nested
        counted.kinds[kind] -= 1
        assert counted.kinds[kind] >= 0, "every finished call was started"
        counted.load -= 1
        counted.slots -= not call.is_nested
        self._end(*kind, 1)

    def _fill(self) -> list[tuple[CallT, WorkerT]]:
        """Start all calls that can start, round robin over the applications; return them."""
        started: list[tuple[CallT, WorkerT]] = []
        while (following := self._next()) is not None:
            call, worker = following
            self._start(call, worker)
            self._drop(call)
            if call.application in self._queues:
                self._queues.move_to_end(call.application)
            started.append(following)
        return started

    def _next(self) -> tuple[CallT, WorkerT] | None:
        """Return the next waiting call that may start, and its worker; None: no call may start."""
        if not self._queues or (worker := self._free_worker()) is None:
            return None
        for name, application in self._queues.items():
            if self._may_start(name):
                return next(iter(application.waiting)), worker
        return None

    def _may_start(self, name: str) -> bool:
        """Whether the share of an application permits a further slot."""
        if not self._is_shared:
            return True
        application = self._applications.get(name)
        own = application.slots if application is not None else 0
        return own < self._slots_of_one(own)

    def _slots_of_one(self, own: int) -> int:
        """Return the number of slots that an application may use while several are deployed; `own`
        is the number of slots that it holds now.
        """
        slots = len(self._workers) * self._worker_calls_max
        return limit_of_one(self._shares.slots, slots, self._slots_used - own, is_shared=True)

    def _free_worker(self) -> WorkerT | None:
        """Return the worker with the fewest calls of those with a free slot; None: no slot is free.
        A plain loop, for speed, because every call runs this method.
        """
        free: WorkerT | None = None
        least = 0
        for worker, counted in self._workers.items():
            if counted.slots >= self._worker_calls_max or worker in self._suspended:
                continue
            if free is None or counted.load < least:
                free, least = worker, counted.load
        return free

    def _load(self, worker: WorkerT) -> tuple[bool, int]:
        return worker in self._suspended, self._workers[worker].load

    def _start(self, call: CallT, worker: WorkerT) -> None:
        """Count a call that starts."""
        application, counted = self._application(call.application), self._workers[worker]
        counted.kinds[call.application, call.is_nested] += 1
        counted.load += 1
        if call.is_nested:
            application.nested += 1
            self._nested += 1
        else:
            application.slots += 1
            counted.slots += 1
            self._slots_used += 1

    def _end(self, name: str, is_nested: bool, count: int) -> None:  # noqa: FBT001 - of a kind
        """Subtract ended calls of one kind."""
        application = self._applications[name]
        if is_nested:
            application.nested -= count
            self._nested -= count
        else:
            application.slots -= count
            self._slots_used -= count
        self._forget(name)

    def _drop(self, call: CallT) -> None:
        """Remove a waiting call from its queue."""
        application = self._queues[call.application]
        del application.waiting[call]
        self._waiting -= 1
        if not application.waiting:
            del self._queues[call.application]
        self._forget(call.application)

    def _application(self, name: str) -> _Application:
        if (application := self._applications.get(name)) is None:
            application = self._applications[name] = _Application()
        return application

    def _forget(self, name: str) -> None:
        """Drop the entry of an application without calls."""
        application = self._applications[name]
        if not (application.nested or application.pending):
            del self._applications[name]
