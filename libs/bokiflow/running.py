"""A run that this process executes, and the callers in this process that wait for it.

`runner` makes a `LocalRun` for each run that it begins to execute. `Handle.result` waits for its
end.
"""

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
        definition: its workflow.
        execution: its current execution; each retry and each round has a separate one.
        partition: its partition.
        ended: a future with the record that ended the run. Its result is None if only the execution
            ended: another process continues the run, the run is parked, or the run left memory.
        task: the task that executes the run; None: the execution has not begun.
        waits_since: when this process first found that the run only waits (monotonic time); None:
            the run also does something else.
        waits_end: the end of the run's history at `waits_since`. When the history has grown,
            `waits_since` and `waits_end` are set anew.
        waits: number of its operations that wait for a record or a time.
        is_notified: whether a record for the run arrived during this execution. If the run then
            leaves memory, it is executed again at once.
        was_stopped: whether this process cancelled the execution, because the lease ended or this
            process no longer owns the partition.
        is_passive: whether this process ends the execution although the run continues: the run only
            waits, or moves to another deployment.
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
        """Whether the run has ended in this execution."""
        return self.ended.done() and self.ended.result() is not None

    @property
    def only_waits(self) -> bool:
        """Whether all its operations in progress wait for a record or a time."""
        return 0 < self.waits == len(self.execution.in_progress)

    @property
    def may_stop(self) -> bool:
        """Whether the execution can be ended now, for example to release the run's partition. That
        is so if all operations in progress wait for a record, a time or a lock.

        A wait for a lock must not keep the partition in this process. The holder of the lock may be
        a run of the same partition, which could then never continue in another process. The next
        execution of the waiting run keeps its place in the queue of the lock.
        """
        execution = self.execution
        return 0 < self.waits + execution.lock_waits == len(execution.in_progress)

    @property
    def may_be_passive(self) -> bool:
        """Whether the run can leave memory: it only waits, and its execution holds no state that a
        replay lacks.
        """
        execution = self.execution
        if not self.only_waits or execution.pins or execution.has_unflushed:
            return False
        # If the workflow's own code began a task, that task would not end with the execution.
        return all(task is self.task for _, task, is_main in execution.waits.values() if is_main)

    def check_same_run(self, definition: Definition, arguments: bytes) -> None:
        """Check that a start with this run's id has the same workflow and arguments as the run
        (`bokiflow.definition.check_same_run`).
        """
        check_same_run(self.execution.id, definition, arguments, self.execution.run)

    def cancel(self) -> None:
        """End the execution although the run continues: cancel its task."""
        assert self.task is not None, "the execution has begun"
        self.execution.is_ending = True
        self.task.cancel()

    def end(self, finished: RunFinished | None) -> None:
        """Notify the callers that wait for the run. `finished`: see `ended`."""
        if not self.ended.done():
            self.ended.set_result(finished)


async def await_body(body: Coroutine[Any, Any, bytes]) -> bytes:
    """Return the result of a workflow. If the workflow's code raises CancelledError itself, the
    workflow has failed.
    """
    try:
        return await body
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"The workflow raised {type(error).__name__}.") from error
