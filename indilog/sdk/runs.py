"""What people see of workflow runs: the values of the operations `runs.list`, `runs.show`,
`runs.events`, `runs.result`, `runs.check`, `runs.move` and `runs.move_all`.

A library with runs offers these operations on an application (`App.add_operation`). The gateway,
the command line and clients read their values in this form, so they do not depend on the library.
Times are seconds since 1970 by the clock of the log.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, TypeAlias

import msgspec

RUNS_MAX: Final = 1_000
"""Largest number of runs in one page."""
STEPS_SHOWN: Final = 20
"""Decided operations of a run that are shown by default."""
STEPS_SHOWN_MAX: Final = 1_000
SIGNALS_SHOWN: Final = 20
"""Largest number of names of unconsumed signals that are shown."""
LIST_RUNS: Final = "runs.list"
SHOW_RUN: Final = "runs.show"
RUN_EVENTS: Final = "runs.events"
START_RUN: Final = "runs.start"
RUN_RESULT: Final = "runs.result"
CHECK_RUNS: Final = "runs.check"
RUN_CODES: Final = "runs.codes"
MOVE_RUN: Final = "runs.move"
MOVE_RUNS: Final = "runs.move_all"

HOLDER_SEPARATOR: Final = "\x1f"
"""Neither the name of a log nor the id of a run contains it."""

_Key: TypeAlias = tuple[float, str, str, int]


def holder_of(log: str, run: str) -> str:
    """Return the holder of the outcomes of a run's calls, from the name of the log of its flow and
    the run's id. With an empty id, the result is the prefix of all holders of that log.
    """
    return f"{log}{HOLDER_SEPARATOR}{run}"


class RunPlace(msgspec.Struct, frozen=True):
    """A place in a list of runs: newest first, then by application, log and seqnum.

    `seqnum` is that of the record with which the run began. In a list of runs by their ends, it is
    that of the record with which the run ended. `time` is when that record was ordered.
    """

    time: float
    app: str = ""
    log: str = ""
    seqnum: int = 0

    @property
    def key(self) -> _Key:
        """A value that grows along the list."""
        return (-self.time, self.app, self.log, -self.seqnum)


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a list.

    `steps`: number of decided operations; None: a list does not count those of an open run.
    `problem`: why the run is parked or failed. `waits`: what the run waits for, if it is not in
    memory. `value`: the status that the workflow set last; a list does not read it. `log` and
    `seqnum`: where the record of its start is. `ended`, `end`: time and seqnum of the record of its
    end; None: the run is open. `version`: number of the deployment whose code executes the run, or
    executed it last; None: not known.
    """

    id: str
    workflow: str
    state: str
    began: float
    app: str = ""
    steps: int | None = None
    problem: str | None = None
    waits: str | None = None
    value: Any = None
    log: str = ""
    seqnum: int = 0
    ended: float | None = None
    end: int | None = None
    version: int | None = None

    def place(self, *, by_end: bool = False) -> RunPlace:
        """Return the run's place in a list by starts, or by ends."""
        if by_end and self.ended is not None and self.end is not None:
            return RunPlace(self.ended, self.app, self.log, self.end)
        return RunPlace(self.began, self.app, self.log, self.seqnum)


class RunPage(msgspec.Struct, frozen=True):
    """Consecutive runs of a list, newest first, that match a query. A page can be iterated.

    `next`: all runs up to this place were looked at; None: there are no further ones. A page may be
    short, or empty, even if there are further runs. `by_end`: whether the list is ordered by the
    ends of the runs; else by their starts.
    """

    runs: tuple[RunInfo, ...] = ()
    next: RunPlace | None = None
    by_end: bool = False

    def __iter__(self) -> Iterator[RunInfo]:
        """Iterate over the runs."""
        return iter(self.runs)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.runs)


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """A decided operation of a run.

    `decided`: when. `attempts`: how often its body ran; None: not recorded. `duration_s`: how long
    it took, in seconds; None: not recorded. `result`: its JSON value, or the first characters of a
    large one as text. `error`: why it failed.
    """

    number: str
    name: str
    kind: str
    decided: float
    attempts: int | None = None
    duration_s: float | None = None
    result: Any = None
    error: str | None = None


class RunWait(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of a run that has not ended.

    `since`: when it began, as far as is known. `until`: when its time limit ends. `attempts`:
    number of failed attempts so far; `error`: the error of the last one. `next_attempt`: when the
    next attempt begins; None: an attempt is in progress, or the operation has no attempts.
    """

    what: str
    since: float | None = None
    until: float | None = None
    attempts: int = 0
    error: str | None = None
    next_attempt: float | None = None


class UnconsumedSignals(msgspec.Struct, frozen=True):
    """Signals of one name that arrived at a run, and that no operation has consumed. `count`: how
    many there are.
    """

    name: str
    count: int


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    `owner`: the executor that executes the run, or did last. `steps`: its last decided operations,
    in the order of the log; `steps_before`: how many there are before them. `waits`: operations
    that have not ended. `unconsumed`: the signals that no operation has consumed, by name, in the
    order of their arrival, at most 20 names; `unconsumed_others`: number of such signals of further
    names. `advice`: what to do about a run that does not continue. `parent`, `forked`: the run and
    step from which it was started. `result`: as that of `RunStep`. `round`: number of the shown
    round, from 1. `predecessor`: number of the round before; None: there is none. `successor`:
    number of the next round, if the shown one has ended as continued; it has the unconsumed
    signals. `moved`: when the run was moved to the code of `run.version`; None: its round began
    with this code. `moves_to`: number of the deployment to whose code the run moves soon.
    """

    run: RunInfo
    owner: str
    epoch: int
    arguments: Any = None
    steps: tuple[RunStep, ...] = ()
    steps_before: int = 0
    waits: tuple[RunWait, ...] = ()
    unconsumed: tuple[UnconsumedSignals, ...] = ()
    unconsumed_others: int = 0
    advice: str | None = None
    cancel_asked: bool = False
    changed: float | None = None
    result: Any = None
    parent: str | None = None
    forked: str | None = None
    round: int = 1
    predecessor: int | None = None
    successor: int | None = None
    moved: float | None = None
    moves_to: int | None = None


class RunMismatch(msgspec.Struct, frozen=True):
    """An open run that the deployed code does not continue; `reason` is the first difference."""

    id: str
    workflow: str
    reason: str


class RunsCheck(msgspec.Struct, frozen=True):
    """Which open runs the deployed code does not continue.

    `checked`: number of runs that were checked. `is_whole`: whether these are all open runs.
    """

    checked: int
    is_whole: bool
    mismatches: tuple[RunMismatch, ...] = ()


class MovedRun(msgspec.Struct, frozen=True):
    """A run that moves to the code of deployment `version`, or uses it already."""

    version: int


class MovedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of a list that move to the code of deployment `version`.

    `moved`: their ids. `refused`: runs whose history the new code does not continue; they keep
    their code. `next`: `page` of the next call; None: there are no further runs.
    """

    version: int | None
    moved: tuple[str, ...] = ()
    refused: tuple[RunMismatch, ...] = ()
    next: str | None = None


class RunEvent(msgspec.Struct, frozen=True):
    """An event of a run. If `kind` is `published`, `data` is what the workflow published. If it is
    `state`, `data` has the keys `state` and `problem`, and `round` if the run continued. `time`:
    when the event was ordered.
    """

    seqnum: int
    time: float
    kind: Literal["published", "state"]
    data: Any = None


class RunEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive events of a run.

    `next`: records of the run below this seqnum were looked at. `has_more`: whether there are
    further records now. `has_ended`: whether the last event is the end of the run. `log`, `tag`:
    the sub-stream with the run's records, where a reader waits for the next record.
    """

    log: str
    tag: str
    next: int
    events: tuple[RunEvent, ...] = ()
    has_more: bool = False
    has_ended: bool = False


class StartedRun(msgspec.Struct, frozen=True):
    """A run that was started, or that existed already with this id."""

    id: str


class RunResult(msgspec.Struct, frozen=True):
    """How a run ended, or that it has not ended.

    `result`: what the workflow returned, if `state` is `done`. `problem`: why it failed, was
    cancelled or is parked.
    """

    state: str
    result: Any = None
    problem: str | None = None


class FoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `runs.result`; `state`, `result` and `problem` are those of `RunResult`.

    `has_ended`: whether the run has ended, so that nothing changes any more. `log`, `tag`: the
    sub-stream with the run's records; those below seqnum `next` were read.
    """

    log: str
    tag: str
    next: int
    state: str
    has_ended: bool
    result: Any = None
    problem: str | None = None

    def shown(self) -> RunResult:
        """Return the part that callers get."""
        return RunResult(self.state, self.result, self.problem)


def merged(pages: Iterable[RunPage], limit: int) -> RunPage:
    """Return the first `limit` runs of several pages of one list that begin at the same place.

    The merged page ends where the first of the pages ends, so no run is left out.
    """
    pages = list(pages)
    ends = [page.next for page in pages if page.next is not None]
    end = min(ends, key=_key, default=None)
    by_end = any(page.by_end for page in pages)

    def key(run: RunInfo) -> _Key:
        return run.place(by_end=by_end).key

    runs = sorted((run for page in pages for run in page.runs), key=key)
    if end is not None:
        runs = [run for run in runs if key(run) <= end.key]
    if len(runs) > limit:
        end = runs[limit - 1].place(by_end=by_end)
    return RunPage(tuple(runs[:limit]), end, by_end)


def with_app(page: RunPage, app: str) -> RunPage:
    """Return a page with the name of its application."""
    replace = msgspec.structs.replace
    end = page.next and replace(page.next, app=app)
    return RunPage(tuple(replace(run, app=app) for run in page.runs), end, page.by_end)


def cursor_of(place: RunPlace) -> str:
    """Return a place as opaque text, for the next page."""
    text = msgspec.json.encode((place.time, place.app, place.log, place.seqnum))
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def place_of(cursor: str) -> RunPlace:
    """Return the place in a text of `cursor_of`.

    Raises:
        ValueError: it is no such text.
    """
    padding = "=" * (-len(cursor) % 4)
    try:
        text = base64.b64decode(cursor + padding, altchars=b"-_", validate=True)
        return RunPlace(*msgspec.json.decode(text, type=tuple[float, str, str, int]))
    except (binascii.Error, msgspec.DecodeError, ValueError, RecursionError):
        raise ValueError("It is the text `next` of an earlier answer.") from None


def _key(place: RunPlace) -> _Key:
    return place.key
