"""Signals: values sent to a run, each consumed once, in log order.

A signal stays in the log until the workflow reads it. An operation consumes the oldest signal of
its name that is not consumed yet. Its choice is decided, so a re-execution gets the same signal.
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
from indilog.sdk import SeqNum

SIGNAL: Final = "signal"
_NONE: Final = b"null"
_decode_got = msgspec.json.Decoder(tuple[SeqNum, Any]).decode


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
            _decode_got(decided.result)[0]
            for decided in execution.run.steps.values()
            if _is_got(decided)
        }
        self._sorted = 0
        """How many of `run.signals` were moved to `_left` so far."""
        self._left: defaultdict[str, deque[tuple[SeqNum, bytes]]] = defaultdict(deque)

    async def next(self, number: str, name: str, ends: float = math.inf) -> Any:  # noqa: ANN401
        """Wait for the next signal `name` and return its value; None: no signal came until `ends`.

        Raises:
            Cancelled: the run was cancelled while waiting.
        """

        async def awaited() -> OperationOutcome:
            got = await wait_for_record(self._execution, ends, found)
            return OperationOutcome(_NONE if got is None else got)

        async def found() -> bytes | None:
            return self._take(name)

        decided = await decide_waiting(self._execution, number, name, SIGNAL, awaited)
        raise_failure(decided)
        return _decode_got(decided.result)[1] if _is_got(decided) else None

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
    return msgspec.json.encode(_decode_got(decided.result)[1]) if _is_got(decided) else _NONE


def _is_got(decided: StepDecided) -> bool:
    return decided.kind == SIGNAL and decided.failure is None and decided.result != _NONE
