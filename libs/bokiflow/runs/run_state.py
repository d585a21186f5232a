"""Derives the state of a run from its records alone, in log order, so that it is the same in every
process.

The executor of a run has an epoch. Its records take effect only until a record begins a later
epoch. So of two concurrent executors, one decides nothing. Of several decisions of one step, the
first in the log takes effect. `bokiflow.runs.states` has the transitions.
"""

from __future__ import annotations

from typing import assert_never

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    OperationNoted,
    RetryAsked,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    RunWaits,
    Signalled,
    StepDecided,
)
from bokiflow.runs.states import State, next_state
from indilog.sdk import SeqNum


class Run:
    """Applies the records of one run in order.

    Attributes:
        end: records below this seqnum are applied.
        state: state as of those records; None: the run has not begun.
        clock: `Record.ordered_at` of the last applied record, seconds since 1970.
        started: the first record of the run; None: there is no such run.
        started_at: seqnum of that record. Valid once `started` is set.
        began: `ordered_at` of that record, seconds since 1970.
        epoch: the current epoch; 0 before the first executor has it.
        executor: name of the executor in this epoch; empty in epoch 0.
        taken_at: seqnum of the record that assigned the run to `executor`.
        crashes: how many executors in a row crashed right after they got the run and decided
            nothing.
        steps: the decided outcomes, by step number, in log order.
        places: seqnums of these decisions.
        noted: the last note about each operation that takes long and is not decided, by number, as
            of the current epoch.
        signals: signals to the run, in log order.
        cancel_asked: whether a cancellation was requested.
        parked: the record that parked the run; None unless it is parked.
        parked_at: `ordered_at` of that record, seconds since 1970.
        was_parked: whether the run was parked, and nothing was decided since.
        is_cancelled_while_parked: whether a cancellation was requested after the run was parked,
            and nothing was decided since. Such a run ends even if no code matches it.
        waits: the record that says that the run only waits; None if an executor has taken it since.
        finished: the record that ended the run, once it has ended.
        ended_at: seqnum of that record. Valid once `finished` is set.
        ended: `ordered_at` of that record, seconds since 1970.
    """

    __slots__ = (
        "_signal_keys", "began", "cancel_asked", "clock", "crashes", "end", "ended", "ended_at",
        "epoch", "executor", "finished", "is_cancelled_while_parked", "noted", "parked",
        "parked_at",
        "places", "signals", "started", "started_at", "state", "steps", "taken_at", "waits",
        "was_parked",
    )  # fmt: skip

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.state: State | None = None
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
        self.noted: dict[str, OperationNoted] = {}
        self.signals: list[tuple[SeqNum, Signalled]] = []
        self._signal_keys: set[str] = set()
        self.cancel_asked = False
        self.parked: RunParked | None = None
        self.parked_at = 0.0
        self.was_parked = False
        self.is_cancelled_while_parked = False
        self.waits: RunWaits | None = None
        self.finished: RunFinished | None = None
        self.ended_at: SeqNum = 0
        self.ended = 0.0

    def apply(self, seqnum: SeqNum, ordered_at: float, record: RunRecord | None) -> bool:
        """Apply the record at `seqnum`; tell whether it takes effect."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.clock = max(self.clock, ordered_at)
        if record is None:
            return False
        state = next_state(self.state, record, self.epoch)
        if state is None or not self._effect(seqnum, record):
            return False
        self.state = state
        assert (self.parked is not None) == (state is State.PARKED), (
            "exactly a parked run has a reason"
        )
        assert self.finished is None or state not in {State.RUNNING, State.PARKED}
        assert self.started is not None, "a run begins with its start"
        assert (self.epoch >= 1) == bool(self.executor), "each epoch has an executor"
        assert self.started_at <= self.taken_at <= seqnum, "the start gives the first executor"
        assert len(self.places) == len(self.steps), "each decision has a place"
        return True

    def _effect(self, seqnum: SeqNum, record: RunRecord) -> bool:
        """Apply a record that the state allows; False if the step already has an outcome."""
        match record:
            case RunStarted(executor=executor):
                assert self.started is None, "a run starts once"
                self.started, self.started_at, self.began = record, seqnum, self.clock
                self.epoch, self.executor, self.taken_at = int(bool(executor)), executor, seqnum
            case Signalled(key=key):
                if key not in self._signal_keys:
                    self._signal_keys.add(key)
                    self.signals.append((seqnum, record))
            case ChildEnded() | RetryAsked():
                pass
            case CancelAsked():
                self.cancel_asked = True
                self.is_cancelled_while_parked = self.is_cancelled_while_parked or self.was_parked
            case OperationNoted(number=number):
                if number in self.steps or self.waits is not None:
                    return False
                self.noted[number] = record
            case RunTaken() | StepDecided() | RunWaits() | RunParked() | RunFinished():
                return self._executor_effect(seqnum, record)
            case unreachable:
                assert_never(unreachable)
        return True

    def _executor_effect(
        self,
        seqnum: SeqNum,
        record: RunTaken | StepDecided | RunWaits | RunParked | RunFinished,
    ) -> bool:
        match record:
            case RunTaken(epoch, executor, crashes):
                assert epoch == self.epoch + 1, "epochs grow one by one"
                self.epoch, self.executor, self.parked = epoch, executor, None
                self.taken_at, self.crashes, self.waits = seqnum, crashes, None
            case StepDecided(number=number):
                if number in self.steps:
                    return False
                self.steps[number], self.places[number] = record, seqnum
                self.was_parked = self.is_cancelled_while_parked = False
                self.crashes = 0
                self.noted.pop(number, None)
                return True
            case RunWaits():
                self.waits, self.crashes = record, 0
            case RunParked():
                self.parked, self.parked_at, self.was_parked = record, self.clock, True
            case RunFinished():
                assert self.finished is None, "a run ends once"
                self.finished, self.ended_at, self.ended = record, seqnum, self.clock
                self.parked = self.waits = None
            case unreachable:
                assert_never(unreachable)
        self.noted.clear()
        return True
