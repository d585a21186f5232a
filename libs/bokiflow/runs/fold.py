"""A run as its records leave it: a pure fold, alike in every process.

The order of the log decides everything. The executor of a run has an epoch, and what it decides
counts only while no later epoch is taken; of two that execute at once, one therefore decides
nothing. Of several decisions of one step the first counts.
"""

from __future__ import annotations

import enum
from typing import assert_never

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    Signalled,
    StepDecided,
)
from indilog.sdk import SeqNum


class State(enum.StrEnum):
    """How far a run is."""

    RUNNING = "running"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Run:
    """Applies the records of one run in order.

    Attributes:
        end: records below this seqnum are applied.
        clock: when the last applied record was ordered, seconds since 1970 (`Record.ordered_at`).
        started: how it began; None: there is no such run.
        started_at: that record's place. Valid once `started` is there.
        began: when that record was ordered, seconds since 1970.
        epoch: the newest that counts; 0 before the start.
        executor: who executes it.
        taken_at: the place of the record that gave it the run.
        crashes: how many executors before ended right after they got the run and decided nothing.
        steps: the outcomes that are decided, by step number, in the order of the log.
        places: where they were decided.
        signals: in the order of the log.
        cancel_asked: whether somebody wants it cancelled.
        parked: why it waits for other code, if it does.
        parked_at: when the record that says so was ordered, seconds since 1970.
        is_given_up: whether a cancellation was asked for while it was parked, and nothing was
            decided since: it ends, also if no code fits.
        finished: how it ended, once it did.
    """

    __slots__ = (
        "_signal_keys", "began", "cancel_asked", "clock", "crashes", "end", "epoch", "executor",
        "finished", "is_given_up", "parked", "parked_at", "places", "signals", "started",
        "started_at", "steps", "taken_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.clock = 0.0
        self.started: RunStarted | None = None
        self.started_at: SeqNum = 0
        self.began = 0.0
        self.epoch = 0
        self.executor = ""
        self.taken_at: SeqNum = 0
        self.crashes = 0
        self.steps: dict[str, StepDecided] = {}
        self.places: dict[str, SeqNum] = {}
        self.signals: list[tuple[SeqNum, Signalled]] = []
        self._signal_keys: set[str] = set()
        self.cancel_asked = False
        self.parked: RunParked | None = None
        self.parked_at = 0.0
        self.is_given_up = False
        self.finished: RunFinished | None = None

    @property
    def state(self) -> State:
        """How far it is."""
        if self.finished is None:
            return State.RUNNING if self.parked is None else State.PARKED
        if self.finished.was_cancelled:
            return State.CANCELLED
        return State.DONE if self.finished.failure is None else State.FAILED

    def apply(self, seqnum: SeqNum, ordered_at: float, record: RunRecord | None) -> bool:
        """Take in the record at `seqnum`; tell whether it counts."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.clock = max(self.clock, ordered_at)
        if record is None or self.finished is not None:
            return False
        if self.started is None:
            return isinstance(record, RunStarted) and self._start(seqnum, record)
        return self._effect(seqnum, record)

    def _start(self, seqnum: SeqNum, record: RunStarted) -> bool:
        self.started, self.started_at, self.began = record, seqnum, self.clock
        self.epoch, self.executor, self.taken_at = 1, record.executor, seqnum
        return True

    def _effect(self, seqnum: SeqNum, record: RunRecord) -> bool:
        match record:
            case RunStarted():
                return False
            case Signalled(key=key):
                if key not in self._signal_keys:
                    self._signal_keys.add(key)
                    self.signals.append((seqnum, record))
            case ChildEnded():
                pass
            case CancelAsked():
                self.cancel_asked = True
                self.is_given_up = self.is_given_up or self.parked is not None
            case RunTaken(epoch, executor, crashes):
                if epoch != self.epoch + 1:
                    return False
                self.epoch, self.executor, self.parked = epoch, executor, None
                self.taken_at, self.crashes = seqnum, crashes
            case StepDecided() | RunParked() | RunFinished():
                return record.epoch == self.epoch and self._of_executor(seqnum, record)
            case unreachable:
                assert_never(unreachable)
        return True

    def _of_executor(self, seqnum: SeqNum, record: StepDecided | RunParked | RunFinished) -> bool:
        match record:
            case StepDecided(number=number):
                if number in self.steps:
                    return False
                self.steps[number], self.places[number] = record, seqnum
                self.is_given_up, self.crashes = False, 0
            case RunParked():
                self.parked, self.parked_at = record, self.clock
            case RunFinished():
                self.finished, self.parked = record, None
            case unreachable:
                assert_never(unreachable)
        return True
