"""Dispatches calls to workers, with their timers and outcomes.

`Dispatcher` decides which worker runs a call; `CallRouter` sends the call over the worker's link. A
call has exactly one outcome. Its slot becomes free when the worker answers or is lost. A call that
timed out is cancelled in its worker, and holds its slot until the worker has answered.
`FunctionHost` submits and cancels calls.

If a worker crashes, or its event loop is blocked (`LivenessProbe`), the calls that the worker has
not begun are moved to another worker (`claims`). A call that was begun may have had effects, so it
is never run again automatically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import structlog

from indilog.base.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    WorkerCrashedError,
)
from indilog.config import NodeConfig
from indilog.link.link_messages import (
    Answer,
    Failed,
    LinkLostError,
    Returned,
    RevokedError,
    error_from,
    failed,
)
from indilog.link.worker_messages import CheckArguments, Invoke
from indilog_compute.workers.call import Call, DeployedApp
from indilog_compute.workers.claims import NO_SLOT, VISIBLE_S
from indilog_compute.workers.dispatch import Dispatcher, Shares
from indilog_compute.workers.liveness_probe import LivenessProbe
from indilog_compute.workers.process import Worker

_ValueT = TypeVar("_ValueT")


class _Worker:
    """A worker that takes calls.

    Attributes:
        probe: detects a blocked event loop.
        calls: calls that the worker has not answered.
        checks: callers that wait until the worker has checked arguments.
        idle: resolves when the worker has no calls left; None: the worker is not drained.
    """

    __slots__ = ("calls", "checks", "idle", "probe")

    def __init__(self, probe: LivenessProbe) -> None:
        self.probe = probe
        self.calls: set[Call] = set()
        self.checks: set[asyncio.Future[Answer | None]] = set()
        self.idle: asyncio.Future[None] | None = None


class CallRouter:
    """Dispatches calls to workers.

    Args:
        node: settings with the limits.
        on_idle: called when the last call of a retired deployment has ended.

    Attributes:
        calls: number of outcomes, by kind.
        moved: number of calls that were moved to another worker.
    """

    def __init__(
        self,
        node: NodeConfig,
        *,
        on_idle: Callable[[DeployedApp], None],
    ) -> None:
        self._dispatcher: Dispatcher[Worker, Call] = Dispatcher(
            worker_calls_max=node.functions.worker_calls_max,
            calls_max=node.functions.calls_pending_max,
            shares=Shares(
                slots=node.functions.app_slots_share_max,
                pending=node.functions.app_pending_share_max,
            ),
            is_shared=False,
        )
        self._node = node
        self._on_idle = on_idle
        self._workers: dict[Worker, _Worker] = {}
        self.calls: dict[str, int] = {"returned": 0, "failed": 0, "timed_out": 0, "crashed": 0}
        self.moved = 0
        self._stopping = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of running calls."""
        return self._dispatcher.running

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return self._dispatcher.waiting

    @property
    def load(self) -> tuple[int, int]:
        """The number of calls that hold a slot or wait for a slot, and the number of slots of all
        workers that take calls.
        """
        return self._dispatcher.load

    def free_slots(self, application: str) -> int:
        """Return how many calls of an application would start at once."""
        return 0 if self._stopping else self._dispatcher.free_slots(application)

    def calls_of(self, worker: Worker) -> int:
        """Return the number of calls that `worker` has not answered."""
        kept = self._workers.get(worker)
        return len(kept.calls) if kept is not None else 0

    async def check_arguments(self, call: str, question: CheckArguments) -> None:
        """Let a worker check the arguments of `call` without running it.

        If the worker crashes or is blocked before its answer, another worker is asked. If no worker
        takes calls, the check waits for a worker. All this takes at most `worker_stop_s` seconds.

        Raises:
            InvalidArgumentsError: the arguments do not fit the function.
            NotReadyError: no worker answered in time.
        """
        try:
            async with asyncio.timeout(self._node.functions.worker_stop_s):
                answer = await self._ask_workers(call, question)
        except TimeoutError:
            raise NotReadyError(f"No function worker answers for {call}; try again.") from None
        if isinstance(answer, Failed):
            raise error_from(answer)

    async def _ask_workers(self, call: str, question: CheckArguments) -> Answer:
        """Ask one worker after the other until one answers."""
        while True:
            worker = await self._wait_for_worker(call)
            with suppress(LinkLostError):
                answer = await self._ask_worker(worker, question)
                if answer is None:
                    continue  # this worker is suspended until it answers a probe
                if not _is_lost(answer):
                    return answer
            self.remove(worker)

    async def _ask_worker(self, worker: Worker, question: CheckArguments) -> Answer | None:
        """Ask a worker that takes calls; None: its event loop is blocked."""
        kept = self._workers[worker]
        answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        number = worker.link.post(question, partial(_resolve, answered))
        kept.checks.add(answered)
        kept.probe.watch()
        try:
            return await answered
        finally:
            kept.checks.discard(answered)
            worker.link.abandon(number)

    async def _wait_for_worker(self, call: str) -> Worker:
        while (worker := self._dispatcher.least_loaded) is None:
            if self._stopping or self._node.functions.workers == 0:
                raise NotReadyError(f"No function worker is up to take {call}; try again.")
            await self._changed.wait()
        return worker

    def _announce_change(self) -> None:
        """Wake the callers that wait for a worker that takes calls."""
        self._changed.set()
        self._changed = asyncio.Event()

    def is_suspended(self, worker: Worker) -> bool:
        """Whether `worker` gets no new calls, because it is blocked or drained."""
        return self._dispatcher.is_suspended(worker)

    def stop(self) -> None:
        """Begin no further calls; waiting calls fail with `NotReadyError`."""
        self._stopping = True
        self._announce_change()
        for call in self._dispatcher.withdraw_all():
            self._complete(call, failed(_stopped(call)))

    def add(self, worker: Worker) -> None:
        """Let a worker take calls, unless it has died since its start."""
        if worker.link.is_lost:
            return
        probe = LivenessProbe(
            worker,
            silent_s=self._node.functions.worker_silent_s,
            on_silent=self._on_silent,
            on_recovered=self._on_recovered,
        )
        self._workers[worker] = _Worker(probe)
        self._run_all(self._dispatcher.add(worker))
        self._announce_change()

    def remove(self, worker: Worker) -> None:
        """Remove a worker that is lost or drained. If its link is lost, the link itself answers the
        worker's calls with an error.
        """
        if (kept := self._workers.pop(worker, None)) is not None:
            kept.probe.stop()
            _resolve(kept.idle, None)
        self._run_all(self._dispatcher.remove(worker))

    def set_shared(self, *, is_shared: bool) -> None:
        """Set whether several applications are deployed, so that each is limited to its share.
        Start the calls that may start now.
        """
        self._run_all(self._dispatcher.set_shared(is_shared=is_shared))

    def check_invariants(self) -> None:
        """Assert that the counts are consistent, and that no call waits although it could run."""
        self._dispatcher.check_invariants()

    async def drain(self, worker: Worker) -> None:
        """Send no further calls to `worker`, wait until it has no calls left, and remove it."""
        kept = self._workers.get(worker)
        if kept is None:
            return
        kept.idle = asyncio.get_running_loop().create_future()
        self._dispatcher.suspend(worker)
        if kept.calls:
            await kept.idle
        self.remove(worker)

    def submit(self, call: Call) -> None:
        """Accept `call`, and run it as soon as a slot is free.

        Raises:
            OverloadedError, NotReadyError: the call was not accepted; nothing was done.
        """
        if self._stopping:
            raise _stopped(call)
        worker = self._dispatcher.admit(call)
        call.deployed.running += 1
        if worker is not None:
            self._run_all([(call, worker)])
        else:
            self._set_timer(call, self._node.functions.call_wait_s_max, self._on_wait_timeout)

    def cancel(self, call: Call) -> None:
        """Cancel a call whose outcome is not needed. If the call has ended, nothing happens."""
        self._stop(call, CallOutcomeUnknownError(f"{call.name} was cancelled by its caller."))

    def withdraw(self, call: Call) -> bool:
        """Forget a call that waits for a slot, because another compute node runs it. The outcome of
        the call is never resolved. False: the call has begun or ended here, and is not forgotten.
        """
        if call.worker is not None or not self._dispatcher.withdraw(call):
            return False
        self._release(call)
        return True

    # --- internal: sending a call to a worker

    def _run_all(self, placed: list[tuple[Call, Worker]]) -> None:
        """Send calls to their workers. If a call cannot be sent, send the calls that then start
        instead.
        """
        for call, worker in placed:
            if not self._dispatch(call, worker):
                placed += self._dispatcher.finished(worker, call)

    def _dispatch(self, call: Call, worker: Worker) -> bool:
        self._take_newest(call)
        if call.deployed.number not in worker.deployments:
            problem = call.deployed.problem or (
                f"{call.name} is not loaded in this worker yet; try again."
            )
            self._complete(call, failed(NotReadyError(problem)))
            return False
        slot = worker.claims.allocate()
        question = Invoke(
            call.deployed.number,
            call.function.name,
            call.arguments,
            call.invocation,
            call.position,
            call.depth,
            slot,
        )
        try:
            call.number = worker.link.post(question, partial(self._on_answer, call, worker, slot))
        except LinkLostError:  # the call was not sent
            self.remove(worker)
            self._put_back([call])
            return False
        except IndilogError as error:
            worker.claims.free(slot)
            self._complete(call, failed(error))
            return False
        call.worker, call.slot = worker, slot
        timeout_s = self._timeout_s(call)
        self._set_timer(call, timeout_s, self._on_call_timeout)
        kept = self._workers[worker]
        kept.calls.add(call)
        kept.probe.watch()
        return True

    def _take_newest(self, call: Call) -> None:
        """Switch a call that has not begun to the newest version of its application."""
        newest = call.deployed
        while newest.successor is not None:
            newest = newest.successor
        if newest is not call.deployed and call.function.name in newest.functions:
            before, call.deployed = call.deployed, newest
            call.function = newest.functions[call.function.name]
            newest.running += 1
            self._forget(before)

    def _put_back(self, calls: list[Call], worker: Worker | None = None) -> None:
        """Queue calls again that a worker certainly never begins.

        `worker` is the worker for which the dispatcher still counts the calls; None: it no longer
        counts the calls.
        """
        wanted: list[Call] = []
        unwanted: list[Call] = []
        for call in calls:  # calls that were cancelled or timed out meanwhile
            is_wanted = not (call.outcome.done() or self._stopping)
            (wanted if is_wanted else unwanted).append(call)
        self.moved += len(wanted)
        try:
            started = self._dispatcher.put_back(wanted, worker)
        except NotReadyError as error:
            for call in wanted:
                self._complete(call, failed(error))
            started = []
        else:
            placed = {call for call, _ in started}
            for call in wanted:
                if call not in placed:
                    self._set_timer(
                        call, self._node.functions.call_wait_s_max, self._on_wait_timeout
                    )
        for call in unwanted:
            if worker is not None:
                started += self._dispatcher.finished(worker, call)
            self._complete(call, failed(_stopped(call)))
        self._run_all(started)

    def _set_timer(self, call: Call, s: float, then: Callable[[Call], None]) -> None:
        if call.timer is not None:
            call.timer.cancel()
        call.timer = asyncio.get_running_loop().call_later(s, then, call)

    # --- internal: the end of a call

    def _on_answer(self, call: Call, worker: Worker, slot: int, answer: Answer) -> None:
        lost = _is_lost(answer)
        if lost:
            worker.claims.revoke(slot)
        else:
            worker.claims.free(slot)
        if call.worker is not worker or call.slot != slot:
            return  # the call was moved; this worker confirms that the call did not run here
        self._leave(call, worker)
        if lost and not worker.claims.is_begun(slot):
            self._run_all(self._dispatcher.finished(worker, call))
            asyncio.get_running_loop().call_later(
                VISIBLE_S, self._fail_or_rerun, call, worker, slot
            )
        elif isinstance(answer, Failed) and answer.kind == RevokedError.__name__:
            self._put_back([call], worker)
        else:
            self._complete(call, self._outcome(call, answer))
            self._run_all(self._dispatcher.finished(worker, call))

    def _leave(self, call: Call, worker: Worker) -> None:
        """Remove a call from its worker. The dispatcher still counts the call there."""
        call.worker, call.slot = None, NO_SLOT
        if (kept := self._workers.get(worker)) is not None:
            kept.calls.discard(call)
            if not kept.calls:
                _resolve(kept.idle, None)

    def _fail_or_rerun(self, call: Call, worker: Worker, slot: int) -> None:
        """Handle a call whose worker is lost: fail the call if it may have begun; otherwise run it
        on another worker.
        """
        if worker.claims.is_begun(slot):
            self._complete(call, self._crashed(call))
        else:
            self._put_back([call])

    def _outcome(self, call: Call, answer: Answer) -> Returned | Failed:
        if isinstance(answer, Returned):
            self.calls["returned"] += 1
            return answer
        if isinstance(answer, Failed) and answer.kind != LinkLostError.__name__:
            self.calls["failed"] += 1
            return answer
        return self._crashed(call)

    def _crashed(self, call: Call) -> Failed:
        self.calls["crashed"] += 1
        return failed(
            WorkerCrashedError(
                f"The worker process died while it ran {call.name}; the call may have had effects."
            )
        )

    def _complete(self, call: Call, outcome: Returned | Failed) -> None:
        """Resolve the outcome of a call, unless it has one, and release the call's resources."""
        if not call.outcome.done():
            call.outcome.set_result(outcome)
        self._release(call)

    def _release(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        self._forget(call.deployed)

    def _forget(self, deployed: DeployedApp) -> None:
        deployed.running -= 1
        assert deployed.running >= 0, "each call was counted at its start"
        if deployed.is_retired and deployed.running == 0 and not deployed.is_kept:
            self._on_idle(deployed)

    # --- internal: calls and workers that do not end

    def _timeout_s(self, call: Call) -> float:
        return call.function.timeout_s or self._node.functions.call_timeout_s

    def _on_wait_timeout(self, call: Call) -> None:
        self.calls["timed_out"] += 1
        self._stop(
            call,
            CallOutcomeUnknownError(
                f"{call.name} was cancelled before it began, because it waited too long."
            ),
        )

    def _on_call_timeout(self, call: Call) -> None:
        self.calls["timed_out"] += 1
        worker, slot = call.worker, call.slot
        timeout_s = self._timeout_s(call)
        state = (
            "it was cancelled"
            if call.function.is_async
            else "it runs in a thread, which continues until it returns or calls ctx.wait"
        )
        self._stop(
            call,
            CallOutcomeUnknownError(
                f"{call.name} did not end within {timeout_s:g} s; {state}, and may have had "
                "effects."
            ),
        )
        if worker is not None:
            frames = worker.link.frames_received
            asyncio.get_running_loop().call_later(
                self._node.functions.worker_stop_s, self._end_if_silent, call, worker, slot, frames
            )

    def _stop(self, call: Call, error: Exception) -> None:
        if call.worker is None and self._dispatcher.withdraw(call):
            self._complete(
                call,
                failed(OverloadedError(f"{call.name} got no worker in time; try again later.")),
            )
            return
        if not call.outcome.done():
            call.outcome.set_result(failed(error))
        if call.worker is not None:
            call.worker.link.cancel(call.number)

    def _end_if_silent(self, call: Call, worker: Worker, slot: int, frames: int) -> None:
        if call.worker is worker and call.slot == slot and worker.link.frames_received == frames:
            structlog.get_logger().warning(
                "worker killed: its event loop was blocked when a call timed out",
                worker=worker.index,
                pid=worker.pid,
                function=call.name,
            )
            worker.abort()

    def _on_silent(self, worker: Worker) -> None:
        """Suspend a worker whose event loop is blocked. Move the calls that it has not begun to
        other workers.
        """
        kept = self._workers.get(worker)
        if kept is None:
            return
        structlog.get_logger().warning(
            "worker suspended: a function blocks its event loop",
            worker=worker.index,
            pid=worker.pid,
        )
        self._dispatcher.suspend(worker)
        for check in kept.checks:
            _resolve(check, None)
        unbegun = [call for call in kept.calls if not worker.claims.is_begun(call.slot)]
        for call in unbegun:
            worker.claims.revoke(call.slot)
        slots = sorted(((call, call.slot) for call in unbegun), key=_sent)
        loop = asyncio.get_running_loop()
        loop.call_later(VISIBLE_S, self._move, worker, slots)
        begun = [self._timeout_s(call) for call in kept.calls if call not in unbegun]
        patience_s = max([self._node.functions.call_timeout_s, *begun])
        frames = worker.link.frames_received
        loop.call_later(patience_s, self._end_if_blocked, worker, patience_s, frames)

    def _end_if_blocked(self, worker: Worker, after_s: float, frames: int) -> None:
        """End a worker that has sent nothing since it was suspended. What blocks it may be a step
        of a workflow, which no call waits for.
        """
        if worker in self._workers and worker.link.frames_received == frames:
            structlog.get_logger().warning(
                "worker killed: its event loop stayed blocked",
                worker=worker.index,
                pid=worker.pid,
                after_s=after_s,
            )
            worker.abort()

    def _move(self, worker: Worker, revoked: list[tuple[Call, int]]) -> None:
        unbegun = [
            call
            for call, slot in revoked
            if call.worker is worker and call.slot == slot and not worker.claims.is_begun(slot)
        ]
        for call in unbegun:
            self._leave(call, worker)
        self._put_back(unbegun, worker)

    def _on_recovered(self, worker: Worker) -> None:
        kept = self._workers.get(worker)
        if kept is not None and kept.idle is None:
            self._run_all(self._dispatcher.resume(worker))
            self._announce_change()


def _is_lost(answer: Answer) -> bool:
    """Whether the worker was lost before it answered."""
    return isinstance(answer, Failed) and answer.kind == LinkLostError.__name__


def _stopped(call: Call) -> NotReadyError:
    return NotReadyError(
        f"The platform stopped before {call.name} began; repeat the call when it is back."
    )


def _sent(revoked: tuple[Call, int]) -> int:
    return revoked[0].number


def _resolve(waiting: asyncio.Future[_ValueT] | None, value: _ValueT) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(value)
