"""One run, as its history shows it to people. `inspection` reads runs with this module.

A `FoundRun` applies all records of a run in the order of the log. It remembers what people see and
a `RunState` lacks: when operations began and were decided, and which events the run published.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from bokiflow.advice import advice_for
from bokiflow.operations.progress import EVENT
from bokiflow.operations.signals import value_of
from bokiflow.operations.timers import SLEEP, TIMER
from bokiflow.run_status import status_of
from bokiflow.runs.records import (
    CODE,
    OperationNoted,
    Origin,
    RecordedFailure,
    RunContinued,
    RunRecord,
    RunStarted,
    StepDecided,
    run_record,
    run_tag,
)
from bokiflow.runs.rounds import SIGNAL, unconsumed_signals
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from indilog import Log, Record, TrimmedError
from indilog.sdk import SeqNum, plain_value, runs

_VALUE_BYTES_MAX: Final = 2_000
"""Larger results are shown by the first characters of their JSON text."""
_NAME_CHARACTERS_MAX: Final = 200
"""Longer names of signals are shown by their first characters."""
_EVENTS_BYTES_MAX: Final = 256 * 1024
"""Bytes of the records of events in one answer. A larger first record is answered alone."""
_PAGE: Final = 1_000


class FoundEvents:
    """Collects a page of the events of a run: the oldest events after a seqnum."""

    def __init__(self, after: SeqNum) -> None:
        self._after = after
        self._events: list[runs.RunEvent] = []
        self._bytes = 0
        self._has_more = False

    def add(self, record: Record, run: RunState, known: RunRecord, before: State | None) -> None:
        """Take a record of the run that took effect; `before` is the run's state before it."""
        if record.seqnum <= self._after:
            return
        if isinstance(known, StepDecided) and known.kind == EVENT and known.failure is None:
            event = runs.RunEvent(record.seqnum, run.clock, "published", plain_value(known.result))
        elif isinstance(known, RunContinued):
            said = {"state": "continued", "problem": None, "round": run.round}
            event = runs.RunEvent(record.seqnum, run.clock, "state", said)
        elif run.state is not before and run.state is not None:
            said = {"state": run.state.value, "problem": status_of("", run).problem}
            event = runs.RunEvent(record.seqnum, run.clock, "state", said)
        else:
            return
        self._bytes += len(record.data)
        self._has_more = self._has_more or (self._bytes > _EVENTS_BYTES_MAX and bool(self._events))
        if not self._has_more:
            self._events.append(event)

    def page(self, found: FoundRun) -> runs.RunEvents:
        """Return the collected events."""
        end = self._events[-1].seqnum + 1 if self._has_more else found.run.end
        return runs.RunEvents(
            log=found.log,
            tag=run_tag(found.id),
            next=max(end, self._after + 1),
            events=tuple(self._events),
            has_more=self._has_more,
            has_ended=found.run.finished is not None and not self._has_more,
        )


class FoundRun:
    """A run, as its history shows it.

    Attributes:
        steps: its last decided operations, each with the time of its decision.
        events: collects its events; None: they are not needed.
        now: log time when the run was read, seconds since 1970.
        changed: when the last record that took effect, except a note, was ordered.
        begun: when operations began, by number, as far as the log shows it; with some operations
            that are decided. A takeover does not change these times.
        progressed: when the last operation was decided; before that, when the run's code, or that
            of its round, was first executed.
        has_successor: whether the shown round has ended and the next round has begun.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        app: str,
        log: str,
        steps: int = 0,
        events: FoundEvents | None = None,
        round: int | None = None,  # noqa: A002
    ) -> None:
        self.id = id
        self.app = app
        self.log = log
        self.run = RunState()
        self.steps: deque[tuple[float, StepDecided]] = deque(maxlen=steps)
        self.events = events
        self.now = self.changed = self.progressed = 0.0
        self.begun: dict[str, float] = {}
        self.has_successor = False
        self._round = round

    @property
    def started(self) -> RunStarted:
        """The record of its start."""
        assert self.run.started is not None, "only a run that has begun is found"
        return self.run.started

    @property
    def workflow(self) -> str:
        """The name of its workflow."""
        return self.started.workflow

    def timers(self) -> dict[str, float]:
        """Return the end of each timer that an operation waits for, by the operation's number."""
        return {number: float(timer.result) for number, timer in self._timers()}

    def notes(self) -> dict[str, OperationNoted]:
        """Return what the log says about the operations in progress, by number. The decision of a
        timer says the same about the operation that waits for the timer as a note.
        """
        waits = {
            number: OperationNoted(
                timer.epoch,
                number,
                timer.name,
                SLEEP if timer.name == SLEEP else SIGNAL,
                self.begun[number],
            )
            for number, timer in self._timers()
        }
        return waits | self.run.noted

    def _timers(self) -> Iterator[tuple[str, StepDecided]]:
        steps = self.run.steps
        for step in steps.values():
            if step.kind == TIMER and (after := _number_after(step.number)) not in steps:
                yield after, step

    def apply(self, record: Record) -> None:
        """Apply the next record of the run."""
        known, before, is_first = run_record(record.data), self.run.state, not self.run.epoch
        if isinstance(known, RunContinued) and self._round == self.run.round:
            self.has_successor = self.has_successor or known.epoch == self.run.epoch
        if self.has_successor:
            return
        if not self.run.apply(record.seqnum, record.ordered_at, known) or known is None:
            return
        if not isinstance(known, OperationNoted):
            self.changed = self.run.clock
        if is_first or isinstance(known, StepDecided | RunContinued):
            self.progressed = self.run.clock
        self._note_beginning(known)
        if self.events is not None:
            self.events.add(record, self.run, known, before)
        if isinstance(known, StepDecided):
            self.steps.append((self.run.clock, known))
        elif isinstance(known, RunContinued):
            self.steps.clear()

    def _note_beginning(self, known: RunRecord) -> None:
        match known:
            case OperationNoted(number=number, since=since) if number != CODE:
                self.begun.setdefault(number, since)
            case StepDecided(number=number, kind=kind) if kind == TIMER:
                self.begun[_number_after(number)] = self.run.clock
            case RunContinued():
                self.begun.clear()
            case _:
                pass

    def wait_of(
        self, number: str, what: str, until: float | None, note: OperationNoted | None
    ) -> runs.RunWait:
        """Return an operation that has not ended, with the content of its note. `until`: the end of
        its timer.
        """
        if note is None:
            return runs.RunWait(what=what, since=self.begun.get(number), until=until)
        is_due = note.next_at is not None and note.next_at > self.now
        return runs.RunWait(
            what=what,
            since=self.begun.get(number, note.since),
            until=until,
            attempts=note.failed,
            error=note.error,
            next_attempt=note.next_at if is_due else None,
        )

    def details(self, waits: tuple[runs.RunWait, ...]) -> runs.RunDetails:
        """Return the description of the run for people."""
        run, started = self.run, self.started
        result = run.finished.result if run.finished is not None else b""
        info = _info(self.id, run, self.app, self.log)
        unconsumed = () if self.has_successor else self._unconsumed()
        return runs.RunDetails(
            run=msgspec.structs.replace(info, state="continued") if self.has_successor else info,
            owner=run.executor,
            epoch=run.epoch,
            arguments=_shown(started.arguments),
            steps=tuple(_step(at, step) for at, step in self.steps),
            steps_before=len(run.steps) - len(self.steps),
            waits=waits,
            unconsumed=unconsumed[: runs.SIGNALS_SHOWN],
            unconsumed_others=sum(one.count for one in unconsumed[runs.SIGNALS_SHOWN :]),
            advice=advice_for(self.id, run),
            cancel_asked=run.cancel_asked,
            changed=self.changed,
            result=_shown(result),
            parent=_origin(started.parent),
            forked=_origin(started.forked),
            round=run.round,
            moved=run.moved,
            moves_to=None if run.move_asked is None else run.move_asked.version,
            predecessor=run.round - 1 or None,
            successor=run.round + 1 if self.has_successor else None,
        )

    def _unconsumed(self) -> tuple[runs.UnconsumedSignals, ...]:
        left = unconsumed_signals(self.run, self.run.steps.values())
        counts = Counter(signal.name for _, signal in left)
        return tuple(
            runs.UnconsumedSignals(name[:_NAME_CHARACTERS_MAX], count)
            for name, count in counts.items()
        )


async def read_found(log: Log, found: FoundRun) -> bool:
    """Read the history of a run; False: there is no such run, or it was trimmed."""
    tag, run = run_tag(found.id), found.run
    while True:
        bound = run.end
        try:
            page = await log.read_range(tag, bound, limit=_PAGE)
        except TrimmedError as error:
            found.run = run = RunState()  # old rounds of the run, or the whole run, were trimmed
            found.steps.clear()
            run.end = max(bound, error.first_seqnum)
            continue
        for record in page:
            found.apply(record)
        if not page or found.has_successor:
            return run.started is not None


def _info(id: str, run: RunState, app: str, log: str) -> runs.RunInfo:  # noqa: A002
    status = status_of(id, run)
    return runs.RunInfo(
        id=id,
        workflow=status.workflow,
        state=status.state.value,
        began=status.began,
        app=app,
        steps=status.steps,
        problem=status.problem,
        value=status.value,
        log=log,
        seqnum=status.place,
        ended=None if run.finished is None else run.ended,
        end=None if run.finished is None else run.ended_at,
        version=status.version,
    )


def _step(at: float, step: StepDecided) -> runs.RunStep:
    return runs.RunStep(
        number=step.number,
        name=step.name,
        kind=step.kind,
        decided=at,
        attempts=step.attempts or None,
        duration_s=None if step.duration_ms is None else step.duration_ms / 1000,
        result=_shown(result_of(step)),
        error=_error(step.failure),
    )


def result_of(step: StepDecided) -> bytes:
    """Return the value, as JSON text, that an operation returned to the workflow."""
    return value_of(step) if step.kind == SIGNAL else step.result


def _number_after(number: str) -> str:
    """Return the number of the operation that follows the operation `number` in its branch."""
    branch, dot, last = number.rpartition(".")
    return f"{branch}{dot}{int(last) + 1}"


def _error(failure: RecordedFailure | None) -> str | None:
    return f"{failure.kind}: {failure.message}" if failure is not None else None


def _origin(origin: Origin | None) -> str | None:
    return f"{origin.run}, step {origin.step}" if origin is not None else None


def _shown(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text. For a large text, return its first characters."""
    if len(text) <= _VALUE_BYTES_MAX:
        return plain_value(text) if text else None
    start = text[:_VALUE_BYTES_MAX].decode(errors="ignore")
    return f"{start}… ({len(text):,} bytes)"
