"""Derives the state of a run from its records alone, in log order, so that it is the same in every
process.

Each executor of a run has an epoch. The records of an executor take effect only until a record
begins a later epoch. So of two concurrent executors, only one decides anything. Of several
decisions of one step, the first in the log takes effect.

A run may have rounds (`Workflow.continue_as_new`). The record that ends a round begins the next
one. Only unconsumed signals, and a cancellation that the workflow has not noticed, remain of
earlier rounds.

`states` has the transitions. `run_log` applies the records; executions, statuses and lists read the
state.
"""

from __future__ import annotations

from typing import assert_never

from bokiflow.runs.records import (
    CODE,
    CancelAsked,
    ChildEnded,
    CodeVersion,
    MoveAsked,
    OperationNoted,
    RetryAsked,
    RunContinued,
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


class RunState:
    """Applies the records of one run in order.

    Attributes:
        end: records below this seqnum are applied.
        state: state as of those records; None: the run has not begun.
        clock: `Record.ordered_at` of the last applied record, seconds since 1970.
        started: the first record of the run; None: there is no such run.
        started_at: seqnum of that record. Valid once `started` is set.
        began: `ordered_at` of that record, seconds since 1970.
        epoch: the current epoch; 0 before the run has its first executor.
        executor: name of the executor in this epoch; empty in epoch 0.
        taken_at: seqnum of the record that assigned the run to `executor`.
        crashes: how many executors in a row crashed right after they got the run, and before they
            decided a step.
        steps: the decided outcomes, by step number, in log order.
        places: seqnums of these decisions.
        noted: the last note about each operation that takes long and is not decided, by number, as
            of the current epoch.
        signals: signals to the run, in log order.
        signal_keys: keys of the signals, by which repeated signals are recognized.
        cancel_asked: whether a cancellation was requested.
        parked: the record that parked the run; None unless it is parked.
        parked_at: `ordered_at` of that record, seconds since 1970.
        was_parked: whether the run was parked, and no step was decided since.
        is_cancelled_while_parked: whether a cancellation was requested after the run was parked,
            and no step was decided since. Such a run ends even if no code matches it.
        waits: the record that says that the run only waits; None if an executor has taken the run
            since.
        finished: the record that ended the run, once it has ended.
        ended_at: seqnum of that record. Valid once `finished` is set.
        ended: `ordered_at` of that record, seconds since 1970.
        round: number of the current round, from 1.
        round_at: seqnum of the record that began the current round.
        floor: the records below this seqnum are of rounds before the previous one, and may be
            trimmed.
        past: number of applied records below `floor`.
        code: the deployment with whose code the run continues; None: it is not known.
        moved: when the run was moved to that code, seconds since 1970; None: its round began with
            that code.
        move_asked: the deployment to whose code the run should move; None: no move is requested.
    """

    __slots__ = (
        "_cancelled_at", "_count", "_others_end", "_whole", "began", "cancel_asked", "clock",
        "code", "crashes", "end", "ended", "ended_at", "epoch", "executor", "finished", "floor",
        "is_cancelled_while_parked", "move_asked", "moved", "noted", "parked", "parked_at", "past",
        "places",
        "round", "round_at", "signal_keys", "signals", "started", "started_at", "state", "steps",
        "taken_at", "waits",
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
        self.signal_keys: dict[str, None] = {}
        self.cancel_asked = False
        self._cancelled_at: SeqNum = -1
        self.parked: RunParked | None = None
        self.parked_at = 0.0
        self.was_parked = False
        self.is_cancelled_while_parked = False
        self.waits: RunWaits | None = None
        self.finished: RunFinished | None = None
        self.ended_at: SeqNum = 0
        self.ended = 0.0
        self.round = 1
        self.round_at: SeqNum = 0
        self.floor: SeqNum = 0
        self.past = 0
        self.code: CodeVersion | None = None
        self.moved: float | None = None
        self.move_asked: CodeVersion | None = None
        self._count = 0
        """Number of applied records that were not forgotten."""
        self._whole = (0, 0)
        """Seqnum of the newest record from which the run can be read, and the number of counted
        records before it.
        """
        self._others_end: SeqNum = 0
        """Seqnum after the last record that is neither a decision nor a note."""

    def apply(self, seqnum: SeqNum, ordered_at: float, record: RunRecord | None) -> bool:
        """Apply the record at `seqnum`; tell whether it takes effect."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.clock = max(self.clock, ordered_at)
        if record is None:
            return False
        state = next_state(self.state, record, self.epoch)
        has_effect = state is not None and self._effect(seqnum, record)
        self._count += 1
        if not isinstance(record, StepDecided | OperationNoted):
            self._others_end = seqnum + 1
        if state is None or not has_effect:
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
        """Apply a record that the state allows; return False if it has no effect nevertheless."""
        match record:
            case RunStarted(executor=executor):
                assert self.started is None, "a run starts once"
                self.started, self.started_at, self.began = record, seqnum, self.clock
                self.epoch, self.executor, self.taken_at = int(bool(executor)), executor, seqnum
                self.round_at, self.code = seqnum, record.code
            case Signalled():
                self._add_signal(seqnum, record)
            case ChildEnded() | RetryAsked():
                pass
            case MoveAsked(code):
                self.move_asked = code
            case CancelAsked():
                self.cancel_asked, self._cancelled_at = True, seqnum
                self.is_cancelled_while_parked = self.is_cancelled_while_parked or self.was_parked
            case OperationNoted(number=number):
                if number in self.steps or (self.waits is not None and number != CODE):
                    return False
                self.noted[number] = record
            case RunContinued():
                self._begin_round(seqnum, record)
            case RunTaken() | StepDecided() | RunWaits() | RunParked() | RunFinished():
                return self._executor_effect(seqnum, record)
            case unreachable:
                assert_never(unreachable)
        return True

    def _add_signal(self, seqnum: SeqNum, signal: Signalled) -> None:
        if signal.key not in self.signal_keys:
            self.signal_keys[signal.key] = None
            self.signals.append((seqnum, signal))

    def _begin_round(self, seqnum: SeqNum, record: RunContinued) -> None:
        """Begin the next round. Signals and cancellations that the record's author had not read
        remain.
        """
        self.floor, self.past = self._whole
        if self._others_end <= record.end:  # else a record after `record.end` may be needed
            self._whole = seqnum, self._count
        left = [(at, signal) for at, signal in self.signals if at >= record.end]
        self.signals, self.signal_keys = [], dict.fromkeys(record.keys)
        for one in record.signals:
            self.signal_keys[one.key] = None
            self.signals.append((one.seqnum, Signalled(one.name, one.value, one.key)))
        for at, signal in left:
            self._add_signal(at, signal)
        self.cancel_asked = record.cancel_asked or self._cancelled_at >= record.end
        self.started = RunStarted(
            record.workflow,
            record.arguments,
            record.executor,
            record.version,
            record.parent,
            limit=record.limit,
            code=record.code,
        )
        self.code, self.moved, self.move_asked = record.code, None, None
        self.started_at, self.began = record.started_at, record.began
        self.round, self.round_at = record.round, seqnum
        self.epoch, self.executor, self.taken_at = record.epoch + 1, record.executor, seqnum
        self.steps, self.places, self.noted = {}, {}, {}
        self.was_parked = self.is_cancelled_while_parked = False
        self.parked = self.waits = None
        self.crashes = 0

    def forget_past(self) -> None:
        """Note that the records below `floor` were trimmed."""
        whole, before = self._whole
        self._count, self._whole = self._count - self.past, (whole, before - self.past)
        self.past = 0

    def become(self, other: RunState) -> None:
        """Take the state of another object for the same run."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def _executor_effect(
        self,
        seqnum: SeqNum,
        record: RunTaken | StepDecided | RunWaits | RunParked | RunFinished,
    ) -> bool:
        match record:
            case RunTaken(epoch, executor, crashes, code):
                assert epoch == self.epoch + 1, "epochs grow one by one"
                if code is not None:
                    if self.code is not None and self.code.digest != code.digest:
                        self.moved = self.clock
                    self.code, self.move_asked = code, None
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
