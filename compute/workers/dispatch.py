"""Which worker runs which call: a pure machine without I/O.

A call goes to the worker with the fewest running calls. When all are full it waits, first come
first served; when too many wait or run, it is refused. A call made by a running call never waits:
its parent holds a slot until it ends, so waiting could lock up the node; such calls are admitted
beyond the slots, up to a bound of their own. A worker can be suspended: it gets no new calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from indilog.errors import NotReadyError, OverloadedError

CallT = TypeVar("CallT", bound=Hashable)
WorkerT = TypeVar("WorkerT", bound=Hashable)


class Dispatcher(Generic[WorkerT, CallT]):
    """Admission and placement of calls.

    Args:
        worker_calls_max: calls that a worker runs at once, besides those made by running calls.
        calls_max: calls that wait or run before a further one is refused; as many again may be
            running that were made by other calls.
    """

    def __init__(self, *, worker_calls_max: int, calls_max: int) -> None:
        self._worker_calls_max = worker_calls_max
        self._calls_max = calls_max
        self._running: dict[WorkerT, int] = {}
        self._suspended: set[WorkerT] = set()
        self._waiting: deque[CallT] = deque()
        self._total = 0

    @property
    def running(self) -> int:
        """Calls that run."""
        return self._total

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return len(self._waiting)

    @property
    def workers(self) -> int:
        """Workers that take calls."""
        return len(self._running)

    @property
    def least_loaded(self) -> WorkerT | None:
        """The worker that a call would go to, if it takes calls."""
        worker = min(self._running, key=self._load, default=None)
        return worker if worker not in self._suspended else None

    def admit(self, call: CallT, *, nested: bool) -> WorkerT | None:
        """Return the worker that runs `call` now, or None: it waits for a slot.

        Raises:
            OverloadedError: the bound is reached; the call is not kept.
            NotReadyError: there is no worker for a nested call, which cannot wait.
        """
        if self._total + len(self._waiting) >= self._calls_max * (2 if nested else 1):
            raise OverloadedError(
                f"{self._total + len(self._waiting):,} calls run or wait on this node, which is "
                "its limit; try again later."
            )
        worker = self._place(nested=nested)
        if worker is None:
            self._waiting.append(call)
        return worker

    def again(self, call: CallT, *, nested: bool) -> WorkerT | None:
        """As `admit`, for a call that was admitted but never begun: it is not refused for their
        number, and waits before all others.

        Raises:
            NotReadyError: there is no worker for a nested call, which cannot wait.
        """
        worker = self._place(nested=nested)
        if worker is None:
            self._waiting.appendleft(call)
        return worker

    def withdraw_all(self) -> list[CallT]:
        """Forget and return all waiting calls."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def is_suspended(self, worker: WorkerT) -> bool:
        """Tell whether `worker` gets no calls at the moment."""
        return worker in self._suspended

    def withdraw(self, call: CallT) -> bool:
        """Forget a waiting call; tell whether it was waiting."""
        try:
            self._waiting.remove(call)
        except ValueError:
            return False
        return True

    def finished(self, worker: WorkerT) -> CallT | None:
        """A call of `worker` ended: return the call that it runs next, if one waits.

        A worker that was removed is not counted any more.
        """
        if worker not in self._running:
            return None
        self._running[worker] -= 1
        self._total -= 1
        assert self._running[worker] >= 0, "every finished call was started"
        return self._next(worker)

    def add(self, worker: WorkerT) -> list[CallT]:
        """A worker takes calls from now on; return those that it starts with."""
        assert worker not in self._running, "a worker is added once"
        self._running[worker] = 0
        return self._filled(worker)

    def suspend(self, worker: WorkerT) -> None:
        """`worker` starts no further calls until `resume`, except nested ones for which there is no
        other.
        """
        if worker in self._running:
            self._suspended.add(worker)

    def resume(self, worker: WorkerT) -> list[CallT]:
        """`worker` takes calls again; return those that it starts with."""
        self._suspended.discard(worker)
        return self._filled(worker) if worker in self._running else []

    def remove(self, worker: WorkerT) -> None:
        """A worker is gone, and its running calls with it."""
        self._suspended.discard(worker)
        self._total -= self._running.pop(worker, 0)

    def check_invariants(self) -> None:
        """Check that the counts agree and that nobody waits beside a free slot."""
        assert self._total == sum(self._running.values()), "the total is the sum of the workers"
        free = any(self._has_room(worker) for worker in self._running)
        assert not (free and self._waiting), "nobody waits while a slot is free"

    def _place(self, *, nested: bool) -> WorkerT | None:
        """Return where a call starts now, counted there; None: it has to wait."""
        worker = min(self._running, key=self._load, default=None)
        if worker is None:
            if nested:
                raise NotReadyError("No function worker is up at the moment; try again.")
            return None
        return self._started(worker) if nested or self._has_room(worker) else None

    def _load(self, worker: WorkerT) -> tuple[bool, int]:
        return worker in self._suspended, self._running[worker]

    def _has_room(self, worker: WorkerT) -> bool:
        return worker not in self._suspended and self._running[worker] < self._worker_calls_max

    def _filled(self, worker: WorkerT) -> list[CallT]:
        started: list[CallT] = []
        while (call := self._next(worker)) is not None:
            started.append(call)
        return started

    def _started(self, worker: WorkerT) -> WorkerT:
        self._running[worker] += 1
        self._total += 1
        return worker

    def _next(self, worker: WorkerT) -> CallT | None:
        if not self._waiting or not self._has_room(worker):
            return None
        self._started(worker)
        return self._waiting.popleft()
