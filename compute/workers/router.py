"""Running calls on workers: who gets which, until when, and what its caller is told.

The placement is `Dispatcher`'s; here are the links, the timers and the outcomes. A call's caller
hears exactly one outcome. Its slot is free again when the worker says that it ended, or is gone:
a call whose time is over is cancelled in the worker, and until that is done it takes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from compute.workers.call import Call, Deployed
from compute.workers.dispatch import Dispatcher
from compute.workers.process import WorkerProcess
from indilog.calls import Answer, Failed, Invoke, LinkLostError, Returned, failed
from indilog.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    WorkerCrashedError,
)

_SILENT_S: Final = 5.0
"""A worker that says nothing for this long after a call's time is over is killed."""


class CallRouter:
    """Gives calls to workers.

    Args:
        worker_calls_max, calls_max: as `Dispatcher`.
        call_timeout_s: for functions that have none of their own.
        on_idle: called when the last call of a retired deployment is over.

    Attributes:
        calls: outcomes so far, by kind.
    """

    def __init__(
        self,
        *,
        worker_calls_max: int,
        calls_max: int,
        call_timeout_s: float,
        on_idle: Callable[[Deployed], None],
    ) -> None:
        self._dispatcher: Dispatcher[WorkerProcess, Call] = Dispatcher(
            worker_calls_max=worker_calls_max, calls_max=calls_max
        )
        self._call_timeout_s = call_timeout_s
        self._on_idle = on_idle
        self.calls: dict[str, int] = {"returned": 0, "failed": 0, "timed_out": 0, "crashed": 0}

    @property
    def running(self) -> int:
        """Calls that run."""
        return self._dispatcher.running

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return self._dispatcher.waiting

    def add(self, worker: WorkerProcess) -> None:
        """A worker takes calls from now on."""
        for call in self._dispatcher.add(worker):
            self._run(call, worker)

    def remove(self, worker: WorkerProcess) -> None:
        """A worker is gone; its link fails the calls that it ran."""
        self._dispatcher.remove(worker)

    def submit(self, call: Call) -> None:
        """Run `call` as soon as a worker has room.

        Raises:
            OverloadedError, NotReadyError: it is not kept; nothing was done.
        """
        worker = self._dispatcher.admit(call, nested=call.depth > 0)
        call.deployed.running += 1
        timeout_s = call.function.timeout_s or self._call_timeout_s
        call.timer = asyncio.get_running_loop().call_later(timeout_s, self._time_over, call)
        if worker is not None:
            self._run(call, worker)

    def cancel(self, call: Call) -> None:
        """Nobody waits for `call` any more: stop it, if it still can be stopped."""
        self._stop(call, CallOutcomeUnknownError(f"{call.name} was cancelled by its caller."))

    # --- inside

    def _run(self, call: Call, worker: WorkerProcess) -> None:
        """Start `call` on `worker`; if that fails, the next one that waits for the slot."""
        current: Call | None = call
        while current is not None and not self._started(current, worker):
            current = self._dispatcher.finished(worker)

    def _started(self, call: Call, worker: WorkerProcess) -> bool:
        if call.deployed.number not in worker.deployments:
            problem = call.deployed.problem or f"{call.name} is not loaded in this worker."
            self._over(call, failed(NotReadyError(problem)))
            return False
        question = Invoke(
            call.deployed.number,
            call.function.name,
            call.arguments,
            call.invocation,
            call.position,
            call.depth,
        )
        try:
            call.number = worker.link.post(question, partial(self._answered, call))
        except IndilogError as error:
            self._over(call, failed(error))
            return False
        call.worker = worker
        return True

    def _answered(self, call: Call, answer: Answer) -> None:
        worker, call.worker = call.worker, None
        assert worker is not None, "an answer belongs to a call that runs"
        self._over(call, self._outcome(call, answer))
        if (waiting := self._dispatcher.finished(worker)) is not None:
            self._run(waiting, worker)

    def _outcome(self, call: Call, answer: Answer) -> Returned | Failed:
        if isinstance(answer, Returned):
            self.calls["returned"] += 1
            return answer
        if isinstance(answer, Failed) and answer.kind != LinkLostError.__name__:
            self.calls["failed"] += 1
            return answer
        self.calls["crashed"] += 1
        return failed(
            WorkerCrashedError(
                f"The worker process died while it ran {call.name}; the call may have had effects."
            )
        )

    def _over(self, call: Call, outcome: Returned | Failed) -> None:
        """The call takes no room any more; tell its caller, who may have been told before."""
        if call.timer is not None:
            call.timer.cancel()
        if not call.outcome.done():
            call.outcome.set_result(outcome)
        deployed = call.deployed
        deployed.running -= 1
        if deployed.retired and deployed.running == 0:
            self._on_idle(deployed)

    def _time_over(self, call: Call) -> None:
        self.calls["timed_out"] += 1
        worker = call.worker
        timeout_s = call.function.timeout_s or self._call_timeout_s
        self._stop(
            call,
            CallOutcomeUnknownError(
                f"{call.name} did not end within {timeout_s:g} s; it was cancelled, and may have "
                "had effects."
            ),
        )
        if worker is not None:
            heard = worker.link.frames_received
            asyncio.get_running_loop().call_later(
                _SILENT_S, self._kill_if_silent, call, worker, heard
            )

    def _stop(self, call: Call, error: Exception) -> None:
        if call.worker is not None:
            if not call.outcome.done():
                call.outcome.set_result(failed(error))
            call.worker.link.cancel(call.number)
        elif self._dispatcher.withdraw(call):
            self._over(
                call, failed(OverloadedError(f"{call.name} found no free worker; try again later."))
            )

    def _kill_if_silent(self, call: Call, worker: WorkerProcess, heard: int) -> None:
        if call.worker is worker and worker.link.frames_received == heard:
            structlog.get_logger().warning(
                "worker killed: silent after a call's time was over",
                worker=worker.index,
                pid=worker.pid,
                function=call.name,
            )
            worker.kill()
