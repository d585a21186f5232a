"""A run that this process executes, and the callers in this process that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from bokiflow.definition import Definition, check_same_run
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.runs.execution import Execution
from bokiflow.runs.held_calls import HeldCalls
from bokiflow.runs.records import RunFinished
from indilog.sdk import SeqNum


class LocalRun:
    """A run that this process executes.

    Attributes:
        partition: its partition.
        ended: a future with the end of the run; None: the run continues in another process, is
            parked, or only waits.
        waits_since: when it was first found to only wait (monotonic time).
        waits_end: the end of its history at that time; if it moves, the time begins again.
        waits: number of its operations that wait for a record or a time.
        is_notified: whether a record for the run came since it began here.
        was_stopped: whether this process stopped it, because the lease ended.
        is_passive: whether this execution ends because the run only waits.
        calls: the calls of its execution; None: the execution has not begun.
    """

    def __init__(
        self, definition: Definition, execution: Execution, partition: OwnedPartition
    ) -> None:
        self.definition = definition
        self.execution = execution
        self.partition = partition
        self.ended: asyncio.Future[RunFinished | None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.waits = 0
        self.waits_since: float | None = None
        self.waits_end: SeqNum = 0
        self.is_notified = False
        self.was_stopped = False
        self.is_passive = False
        self.calls: HeldCalls | None = None

    @property
    def has_finished(self) -> bool:
        """Whether it has ended here."""
        return self.ended.done() and self.ended.result() is not None

    @property
    def only_waits(self) -> bool:
        """Whether all its operations in progress wait for a record or a time."""
        return 0 < self.waits == len(self.execution.in_progress)

    @property
    def may_stop(self) -> bool:
        """Whether it can be stopped now, so that its partition can be released. The next execution
        keeps its place in the queue of a lock. If a run that waits for a lock kept its partition,
        the holder of the lock could not continue in that partition, and neither could end.
        """
        execution = self.execution
        return 0 < self.waits + execution.lock_waits == len(execution.in_progress)

    @property
    def may_be_passive(self) -> bool:
        """Whether nothing but its waits is in memory, so that it can continue by a replay."""
        execution = self.execution
        if not self.only_waits or execution.pins or execution.has_unflushed:
            return False
        # A task that the workflow began itself would not end with the execution.
        return all(task is self.task for _, task, is_main in execution.waits.values() if is_main)

    def check_same_run(self, definition: Definition, arguments: bytes) -> None:
        """Call `bokiflow.definition.check_same_run` for a start with this run's id."""
        check_same_run(self.execution.id, definition, arguments, self.execution.run)

    def end(self, finished: RunFinished | None) -> None:
        """Notify the callers that wait for the run."""
        if not self.ended.done():
            self.ended.set_result(finished)


async def await_body(body: Coroutine[Any, Any, bytes]) -> bytes:
    """Return the result of a workflow. If its code raises CancelledError itself, it has failed."""
    try:
        return await body
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"The workflow raised {type(error).__name__}.") from error
