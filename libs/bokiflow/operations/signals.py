"""Signals: values sent to a run, each consumed once, in log order.

A signal stays in the log until the workflow consumes it. An operation consumes the oldest
unconsumed signal of its name. The log decides which signal an operation gets, so a re-execution
gets the same signal. `Handle.signal` sends signals; `Operations.signal` waits for them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, Final

import msgspec

from bokiflow.operations.notifications import decide_waiting, wait_for_record
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import Execution, OperationOutcome, raise_failure
from bokiflow.runs.records import StepDecided
from bokiflow.runs.rounds import NO_SIGNAL, SIGNAL, consumed_signal
from indilog.sdk import SeqNum

NOTED_AFTER_S: Final = 0.25
"""Seconds after which a wait for a signal without a time limit is noted (`operation_notes`). With a
time limit, the timer's decision shows the wait.
"""


def check_name(name: str) -> None:
    """Raise for an invalid name of a signal.

    Raises:
        FlowSettingsError: the name is empty.
    """
    if not name:
        raise FlowSettingsError("A signal's name must not be empty.")


class Signals:
    """The signals of one run that its execution has not consumed."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._taken = {
            got[0]
            for decided in execution.run.steps.values()
            if (got := consumed_signal(decided)) is not None
        }
        self._sorted = 0
        """Number of entries of `run.signals` that were moved to `_left` so far."""
        self._left: defaultdict[str, deque[tuple[SeqNum, bytes]]] = defaultdict(deque)

    async def next(self, number: str, name: str, ends: float = math.inf) -> Any:  # noqa: ANN401
        """Wait for the next signal `name` and return its value; None: no signal came until `ends`.

        Raises:
            Cancelled: the run was cancelled while waiting.
        """

        async def awaited() -> OperationOutcome:
            got = await wait_for_record(self._execution, ends, found)
            return OperationOutcome(NO_SIGNAL if got is None else got)

        async def found() -> bytes | None:
            return self._take(name)

        noted_after_s = NOTED_AFTER_S if ends == math.inf else math.inf
        decided = await decide_waiting(
            self._execution, number, name, SIGNAL, awaited, noted_after_s=noted_after_s
        )
        raise_failure(decided)
        consumed = consumed_signal(decided)
        return None if consumed is None else consumed[1]

    def _take(self, name: str) -> bytes | None:
        signals = self._execution.run.signals
        if self._sorted < len(signals):
            for seqnum, signal in signals[self._sorted :]:
                if seqnum not in self._taken:
                    self._left[signal.name].append((seqnum, signal.value))
            self._sorted = len(signals)
        left = self._left[name]
        return b"[%d,%b]" % left.popleft() if left else None


def value_of(decided: StepDecided) -> bytes:
    """Return the JSON text of the value that an operation `SIGNAL` returned."""
    consumed = consumed_signal(decided)
    return NO_SIGNAL if consumed is None else msgspec.json.encode(consumed[1])
