"""Lists the runs of a flow, newest first, and finds single runs, without reading their histories.

Open runs are in the states of their partitions. The record that ends a run has all that a list
shows of the run. There are tags for the starts of all runs, the starts of each workflow, and the
ends in each state. So a page reads about as many records as it lists runs, whatever the number of
runs.

A prefix of ids is compared with the newest starts in memory (`bokiflow.runs.recent_starts`), and
then with each older start that fits the other filters. A list by ends compares the prefix with each
end that fits the other filters.

The list of starts is trimmed by age. After its last entry, a page continues with runs that began
earlier: open runs, and runs whose end has the tag `flows-late`.

`inspection`, `handle` and `flow` list and find runs with this module.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - the runs of a page are looked up concurrently
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from bokiflow.limits.limit_state import LimitState
from bokiflow.limits.waits_text import turn_wait
from bokiflow.ownership import crash_loops
from bokiflow.ownership.partition_state import OpenRun, PartitionState, Phase
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.backwards import Backwards
from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.recent_starts import RecentStart, RecentStarts, start_in
from bokiflow.runs.records import (
    LATE_TAG,
    RUN_PREFIX,
    RunFinished,
    ends_tag,
    partition_of,
    run_in,
    run_record,
    run_tag,
    starts_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State, end_state
from indilog import DataLossError, Log, Record, TrimmedError
from indilog.sdk import MAX_SEQNUM, SeqNum, runs

OPEN: Final = frozenset({State.RUNNING, State.PARKED})
SCAN_S_MAX: Final = 2.0
"""Seconds after which a page ends, even if it is not full."""
_LATE_RECORDS_MAX: Final = 16
"""Records at the end of a run's sub-stream that are read to find the end of the run. If the end is
not among them, the whole run is read.
"""
_TICK_S: Final = 1e-6
"""Resolution of the time of the log."""
_PAGE_MIN: Final = 16
_UNREADABLE: Final = "unreadable"


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a log that are listed, and the place where the list begins.

    The time of a run in a list is the time of its start. In a list of runs that ended in one state,
    it is the time of its end.

    Attributes:
        app: name of the application.
        log: name of the log.
        workflow: only runs of this workflow.
        state: only runs in this state.
        id_prefix: only runs whose id begins with this.
        version: only runs that continue, or have ended, with the code of this deployment.
        time_max, time_min: bounds of the time of a run, seconds since 1970.
        after: only runs after this place in the list (`RunPlace.key`).
    """

    app: str
    log: str
    workflow: str | None = None
    state: State | None = None
    id_prefix: str = ""
    version: int | None = None
    time_max: float | None = None
    time_min: float | None = None
    after: tuple[float, str, str, int] | None = None

    async def narrowed(
        self,
        log: Log,
        *,
        older_s: float | None,
        newer_s: float | None,
        before: runs.RunPlace | None,
    ) -> RunFilter:
        """Return a narrower filter. Its runs are at least `older_s` and at most `newer_s` seconds
        old by log time, and come after the place `before`.
        """
        now = 0.0 if older_s is None and newer_s is None else await log.now()
        return msgspec.structs.replace(
            self,
            time_max=None if older_s is None else now - older_s,
            time_min=None if newer_s is None else now - newer_s,
            after=None if before is None else before.key,
        )

    @property
    def by_end(self) -> bool:
        """Whether the runs are listed by their ends, not by their starts."""
        return self.state is not None and self.state not in OPEN

    def place(self, time: float, seqnum: SeqNum) -> runs.RunPlace:
        """Return a place in the list of all applications."""
        return runs.RunPlace(time, self.app, self.log, seqnum)

    def has_place(self, time: float, seqnum: SeqNum) -> bool:
        """Whether a run with this place may be listed."""
        return (
            (self.time_max is None or time <= self.time_max)
            and (self.time_min is None or time >= self.time_min)
            and (self.after is None or self.place(time, seqnum).key > self.after)
        )

    def has_name(self, id: str, workflow: str) -> bool:  # noqa: A002
        """Whether a run with this id and workflow may be listed."""
        return self.workflow in {None, workflow} and id.startswith(self.id_prefix)

    def has_version(self, version: int | None) -> bool:
        """Whether a run with the code of this deployment may be listed."""
        return self.version in {None, version}

    def has(self, info: runs.RunInfo) -> bool:
        """Whether a run fits all conditions of this filter."""
        place = info.place(by_end=self.by_end)
        is_in_state = self.state is None or info.state == self.state
        named = self.has_name(info.id, info.workflow) and self.has_version(info.version)
        return is_in_state and named and self.has_place(place.time, place.seqnum)


class _Listed(NamedTuple):
    """A run in the state of its partition."""

    id: str
    run: OpenRun


async def list_runs(log: Log, runner: Runner, wanted: RunFilter, limit: int) -> runs.RunPage:
    """Return the first runs that the filter wants, newest first: `limit` runs or fewer.

    Raises:
        IndilogError: the errors of reads of the log.
    """
    await runner.member.look_once(log)
    if wanted.by_end:
        return await _ended_page(log, runner, wanted, limit)
    if wanted.state is not None:
        found = await _open_page(log, runner, wanted, limit, MAX_SEQNUM)
        return _page(found, wanted, limit)
    return await _whole_page(log, runner, wanted, limit)


def _page(found: Sequence[runs.RunInfo], wanted: RunFilter, limit: int) -> runs.RunPage:
    """Return a page that ends the list if it is not full."""
    end = found[limit - 1].place(by_end=wanted.by_end) if len(found) >= limit else None
    return runs.RunPage(tuple(found[:limit]), end, by_end=wanted.by_end)


# --- single runs


async def find_run(log: Log, runner: Runner, id: str, app: str = "") -> runs.RunInfo | None:  # noqa: A002
    """Return a run; None: the run does not exist or was trimmed. Its history is not read.

    Raises:
        DataLossError: the end of the run is lost.
        FlowVersionError: another version wrote the run.
    """
    await runner.member.look_once(log)
    state = await runner.read_partition(log, partition_of(id, runner.member.count))
    if (run := await find_open(log, state, id)) is not None:
        limits = await _limits(log, runner, [run])
        return _open_info(id, run, app, log.name, limits)
    return await _find_ended(log, state, id, app, MAX_SEQNUM)


async def find_open(log: Log, state: PartitionState, id: str) -> OpenRun | None:  # noqa: A002
    """Return a run of a partition; None: the run is not open."""
    run = state.runs.get(id)
    return None if run is None or await _is_repeated(log, state, id, run) else run


async def _is_repeated(log: Log, state: PartitionState, id_: str, run: OpenRun) -> bool:
    """Tell whether a start in the state of a partition repeats the start of a run that has ended.

    The partition's owner removes such a start soon. A run that was executed before, waits or is
    parked is no repetition.
    """
    if run.phase != Phase.RUNNING or run.epoch > 1:
        return False
    return await _find_ended(log, state, id_, "", run.started_at - 1) is not None


async def _find_ended(
    log: Log, state: PartitionState, id_: str, app: str, bound: SeqNum
) -> runs.RunInfo | None:
    """Return the run whose end is at seqnum `bound` or below; None: there is no such end."""
    for _ in range(_LATE_RECORDS_MAX):
        if bound < 0:
            return None
        try:
            record = await log.read_prev(run_tag(id_), bound)
        except TrimmedError:
            return None
        if record is None:
            return None
        said = run_record(record.data)
        if isinstance(said, RunFinished) and record.seqnum not in state.void_ends:
            return _ended_info(id_, record.seqnum, record.ordered_at, said, app, log.name)
        bound = record.seqnum - 1
    return await _read_whole(log, id_, app, bound)


async def _read_whole(log: Log, id_: str, app: str, bound: SeqNum) -> runs.RunInfo | None:
    try:
        run = await read_run(log, id_, RunState(), is_reused=True)
    except TrimmedError:
        return None
    if run.finished is None or run.ended_at > bound:
        return None
    return _ended_info(id_, run.ended_at, run.ended, run.finished, app, log.name)


# --- what is shown


async def _limits(log: Log, runner: Runner, found: Iterable[OpenRun]) -> dict[str, LimitState]:
    """Return the limits for which the runs `found` may wait, by name."""
    names = {run.limit for run in found if run.limit}
    states = await asyncio.gather(*(runner.taking.turns.read(log, name) for name in names))
    return dict(zip(names, states, strict=True))


def _open_info(
    id_: str, run: OpenRun, app: str, log: str, limits: Mapping[str, LimitState]
) -> runs.RunInfo:
    waits = run.what if run.phase == Phase.WAITING else None
    if (limit := limits.get(run.limit)) is not None:
        wait = turn_wait(run.limit, limit, id_, is_brief=True)
        waits = waits if wait is None else wait.what
    is_parked = run.phase == Phase.PARKED
    problem = run.what if is_parked else None
    if not is_parked and run.crashes:
        problem = crash_loops.problem(run.crashes)
    return runs.RunInfo(
        id=id_,
        workflow=run.workflow,
        state=(State.PARKED if is_parked else State.RUNNING).value,
        began=run.began,
        app=app,
        problem=problem,
        waits=waits,
        log=log,
        seqnum=run.started_at,
        version=None if run.code is None else run.code.version,
    )


def _ended_info(
    id_: str, seqnum: SeqNum, time: float, finished: RunFinished, app: str, log: str
) -> runs.RunInfo:
    failure = finished.failure
    return runs.RunInfo(
        id=id_,
        workflow=finished.workflow,
        state=end_state(finished).value,
        began=finished.began,
        app=app,
        steps=finished.steps,
        problem=f"{failure.kind}: {failure.message}" if failure is not None else None,
        log=log,
        seqnum=finished.started_at,
        ended=time,
        end=seqnum,
        version=finished.version or None,
    )


# --- open runs


async def _open_page(
    log: Log, runner: Runner, wanted: RunFilter, limit: int, below: SeqNum
) -> list[runs.RunInfo]:
    """Return the first open runs that the filter wants and that began below the seqnum `below`."""
    count, found = runner.member.count, list[runs.RunInfo]()
    while len(found) < limit:
        states, missing = await all_states(log, runner), limit - len(found)
        streams = [_newest_first(state, wanted, below) for state in states]
        some = list(islice(heapq.merge(*streams, key=_started_at, reverse=True), missing))
        if not some:
            break
        below = _started_at(some[-1])
        limits = await _limits(log, runner, (run for _, run in some))
        infos = [_open_info(id_, run, wanted.app, wanted.log, limits) for id_, run in some]
        repeated = await asyncio.gather(
            *(_is_repeated(log, states[partition_of(id_, count)], id_, run) for id_, run in some)
        )
        found += [info for info, is_out in zip(infos, repeated, strict=True) if not is_out]
    return found


def _started_at(listed: _Listed) -> SeqNum:
    return listed.run.started_at


def _newest_first(state: PartitionState, wanted: RunFilter, below: SeqNum) -> Iterator[_Listed]:
    """Yield the open runs of a partition that the filter wants and that began below `below`."""
    known = state.runs
    if wanted.state is State.PARKED:
        ids: Iterable[str] = sorted(state.parked, key=lambda id_: -known[id_].started_at)
    else:
        ids = reversed(known)
    is_running = wanted.state is State.RUNNING
    for id_ in ids:
        run = known[id_]
        if run.started_at >= below or (is_running and run.phase == Phase.PARKED):
            continue
        if wanted.time_min is not None and run.began < wanted.time_min:
            break
        version = None if run.code is None else run.code.version
        is_named = wanted.has_name(id_, run.workflow) and wanted.has_version(version)
        if is_named and wanted.has_place(run.began, run.started_at):
            yield _Listed(id_, run)


async def all_states(log: Log, runner: Runner) -> list[PartitionState]:
    """Return the states of all partitions, by number."""
    numbers = range(runner.member.count)
    return await asyncio.gather(*(runner.read_partition(log, number) for number in numbers))


# --- ended runs


async def _ended_page(log: Log, runner: Runner, wanted: RunFilter, limit: int) -> runs.RunPage:
    assert wanted.state is not None, "the runs of one state are listed"
    tag = ends_tag(wanted.state, wanted.workflow)
    backwards = Backwards(log, tag, await _first_bound(log, wanted))
    found: list[runs.RunInfo] = []
    end_s = waiting.monotonic_now() + SCAN_S_MAX
    while page := await backwards.page(_page_size(wanted, limit - len(found))):
        void = await _void_ends(log, runner, page)
        for record in page:
            time = record.ordered_at
            if wanted.time_min is not None and time < wanted.time_min:
                return _page(found, wanted, limit)
            info = None if record.seqnum in void else _end_in(record, wanted)
            if info is not None and wanted.has(info):
                found.append(info)
            if len(found) >= limit or waiting.monotonic_now() > end_s:
                return runs.RunPage(
                    tuple(found), wanted.place(time, record.seqnum), by_end=wanted.by_end
                )
    return _page(found, wanted, limit)


def _end_in(record: Record, wanted: RunFilter) -> runs.RunInfo | None:
    if not _may_be_named(record, wanted):
        return None
    id_ = run_in(record.tags)
    try:
        finished = run_record(record.data)
    except FlowVersionError:
        return None
    if id_ is None or not isinstance(finished, RunFinished):
        return None
    return _ended_info(id_, record.seqnum, record.ordered_at, finished, wanted.app, wanted.log)


async def _void_ends(log: Log, runner: Runner, page: Sequence[Record]) -> set[SeqNum]:
    """Return the seqnums of ends in a page that had no effect."""
    count = runner.member.count
    newest: dict[int, SeqNum] = {}
    for record in page:
        if (id_ := run_in(record.tags)) is not None:
            newest.setdefault(partition_of(id_, count), record.seqnum)
    states = await asyncio.gather(
        *(runner.read_partition(log, number, own=seqnum) for number, seqnum in newest.items())
    )
    return {seqnum for state in states for seqnum in state.void_ends}


# --- all runs


async def _whole_page(log: Log, runner: Runner, wanted: RunFilter, limit: int) -> runs.RunPage:
    if wanted.id_prefix:
        starts: _Starts = _NamedStarts(log, wanted, runner.recent_starts)
    else:
        starts = _Starts(log, wanted, await _first_bound(log, wanted))
    found: list[runs.RunInfo] = []
    end_s = waiting.monotonic_now() + SCAN_S_MAX
    while some := await starts.next(limit - len(found), end_s):
        infos = await _runs_of(log, runner, wanted, some)
        found += [info for info in infos if info is not None and wanted.has_version(info.version)]
        if len(found) >= limit:
            return runs.RunPage(tuple(found), found[-1].place())
    if starts.looked_at is not None:
        return runs.RunPage(tuple(found), starts.looked_at)
    if starts.floor:
        found += await _earlier_runs(log, runner, wanted, limit - len(found), starts.floor)
    return _page(found, wanted, limit)


class _Starts:
    """Reads the starts of runs that the filter wants, newest first.

    Attributes:
        looked_at: the place where the reading ended early because it took long; None: it has not
            ended early.
    """

    def __init__(self, log: Log, wanted: RunFilter, bound: SeqNum) -> None:
        self.looked_at: runs.RunPlace | None = None
        self._backwards = Backwards(log, starts_tag(wanted.workflow), bound)
        self._wanted = wanted
        self._left: list[RecentStart] = []
        self._has_ended = False

    @property
    def floor(self) -> SeqNum:
        """The seqnum below which the wanted list of starts is trimmed; 0: not needed."""
        return 0 if self._has_ended else self._backwards.floor

    async def next(self, count: int, end_s: float) -> list[RecentStart]:
        """Return the next `count` starts, or fewer if the list or the time (`end_s`) ends."""
        found = self._left
        while len(found) < count and not self._has_ended and self.looked_at is None:
            page = await self._read(count - len(found))
            if page is None:
                break
            found += [start for start in page.starts if _is_start_wanted(start, self._wanted)]
            self._note(page.last, end_s)
        self._left = found[count:]
        return found[:count]

    async def _read(self, missing: int) -> _StartPage | None:
        """Return further starts; None: there are no more."""
        page = await self._backwards.page(_page_size(self._wanted, missing))
        if not page:
            return None
        starts = [
            start
            for record in page
            if _may_be_named(record, self._wanted) and (start := start_in(record)) is not None
        ]
        return _StartPage(starts, (page[-1].ordered_at, page[-1].seqnum))

    def _note(self, last: tuple[float, SeqNum] | None, end_s: float) -> None:
        """End the reading if all wanted starts were read, or if it took long. A page that ends
        early must end after the place where it began, so that the next page makes progress.
        """
        if last is None:
            return
        wanted, (time, seqnum) = self._wanted, last
        place = wanted.place(time, seqnum)
        if wanted.time_min is not None and time < wanted.time_min:
            self._has_ended = True
        elif waiting.monotonic_now() > end_s and (wanted.after is None or place.key > wanted.after):
            self.looked_at = place


class _StartPage(NamedTuple):
    """A page of starts, newest first. `last`: time and seqnum of the last start that was read;
    None: not known.
    """

    starts: Sequence[RecentStart]
    last: tuple[float, SeqNum] | None


class _NamedStarts(_Starts):
    """Reads the starts of runs whose ids have a prefix: from memory first, then from the log."""

    def __init__(self, log: Log, wanted: RunFilter, recent: RecentStarts) -> None:
        super().__init__(log, wanted, MAX_SEQNUM)
        self._log = log
        self._recent: RecentStarts | None = recent
        self._has_begun = False
        self._before: SeqNum = 0
        """The starts at or above this seqnum were read from memory."""

    @property
    def floor(self) -> SeqNum:
        """See `_Starts.floor`."""
        known = 0 if self._recent is None else self._recent.floor
        return 0 if self._has_ended else max(self._backwards.floor, known)

    async def _read(self, missing: int) -> _StartPage | None:
        recent, prefix = self._recent, self._wanted.id_prefix
        if recent is None:
            return await super()._read(missing)
        find = recent.find_older if self._has_begun else recent.find
        starts, self._has_begun = await find(self._log, prefix), True
        if starts is not None:
            self._before, oldest = recent.oldest, recent.oldest_start
            return _StartPage(starts, None if oldest is None else (oldest.time, oldest.seqnum))
        if recent.is_whole:
            return None
        self._recent = None
        first = await _first_bound(self._log, self._wanted)
        bound = min(self._before - 1, first)
        self._backwards = Backwards(self._log, starts_tag(self._wanted.workflow), bound)
        return await super()._read(missing)


def _is_start_wanted(start: RecentStart, wanted: RunFilter) -> bool:
    return wanted.has_name(start.id, start.workflow) and wanted.has_place(start.time, start.seqnum)


def _may_be_named(record: Record, wanted: RunFilter) -> bool:
    """Whether this record may name a run with the wanted prefix. The record is not decoded."""
    return not wanted.id_prefix or f"{RUN_PREFIX}{wanted.id_prefix}".encode() in record.names


async def _runs_of(
    log: Log, runner: Runner, wanted: RunFilter, starts: Sequence[RecentStart]
) -> list[runs.RunInfo | None]:
    """Return the runs that these starts began, in their order; None: a start had no effect."""
    ended = await _ends_after(log, runner, wanted, starts)
    left = [start for start in starts if start.seqnum not in ended]
    count = runner.member.count
    numbers = {partition_of(start.id, count) for start in left}
    read = [runner.read_partition(log, number) for number in numbers]
    states = dict(zip(numbers, await asyncio.gather(*read), strict=True))
    known = [states[partition_of(start.id, count)].runs.get(start.id) for start in left]
    limits = await _limits(log, runner, filter(None, known))

    async def one(start: RecentStart) -> runs.RunInfo | None:
        if (info := ended.get(start.seqnum)) is not None:
            return info
        return await _run_of(log, states[partition_of(start.id, count)], limits, wanted, start)

    return await asyncio.gather(*map(one, starts))


async def _ends_after(
    log: Log, runner: Runner, wanted: RunFilter, starts: Sequence[RecentStart]
) -> dict[SeqNum, runs.RunInfo]:
    """Return the runs that ended soon after the first of these starts, by the seqnum of their
    start. Most runs are short, so these few reads find the ends of most runs of a page.
    """
    first, limit = starts[-1].seqnum, 2 * len(starts) + _PAGE_MIN
    tags = [ends_tag(state, wanted.workflow) for state in State if state not in OPEN]

    async def read(tag: str) -> list[Record]:
        try:
            return await log.read_range(tag, first, limit=limit)
        except (TrimmedError, DataLossError):
            return []  # `_run_of` then finds the runs one by one

    records = [record for page in await asyncio.gather(*map(read, tags)) for record in page]
    places = {start.seqnum for start in starts}
    found = [(record, _end_in(record, wanted)) for record in records]
    its = [(record, info) for record, info in found if info and info.seqnum in places]
    void = await _void_ends(log, runner, [record for record, _ in its])
    return {info.seqnum: info for record, info in its if record.seqnum not in void}


async def _run_of(
    log: Log,
    state: PartitionState,
    limits: Mapping[str, LimitState],
    wanted: RunFilter,
    start: RecentStart,
) -> runs.RunInfo | None:
    id_, run = start.id, state.runs.get(start.id)
    if run is not None and run.started_at <= start.seqnum:
        is_its = run.started_at == start.seqnum
        if not is_its or await _is_repeated(log, state, id_, run):
            return None
        return _open_info(id_, run, wanted.app, wanted.log, limits)
    try:
        bound = MAX_SEQNUM if run is None else run.started_at - 1
        info = await _find_ended(log, state, id_, wanted.app, bound)
    except (DataLossError, FlowVersionError) as error:
        return _unreadable(start, wanted, str(error))
    return info if info is not None and info.seqnum == start.seqnum else None


def _unreadable(start: RecentStart, wanted: RunFilter, problem: str) -> runs.RunInfo:
    """Return a run whose end is lost, or was written by another version."""
    return runs.RunInfo(
        id=start.id,
        workflow=start.workflow,
        state=_UNREADABLE,
        began=start.time,
        problem=problem,
        app=wanted.app,
        log=wanted.log,
        seqnum=start.seqnum,
    )


async def _earlier_runs(
    log: Log, runner: Runner, wanted: RunFilter, limit: int, floor: SeqNum
) -> list[runs.RunInfo]:
    """Return the first runs that began below `floor`: the list no longer has their starts."""
    found = await _open_page(log, runner, wanted, limit, floor)
    backwards = Backwards(log, LATE_TAG)
    while page := await backwards.page(runs.RUNS_MAX):
        void = await _void_ends(log, runner, page)
        ended = [_end_in(record, wanted) for record in page if record.seqnum not in void]
        found += [
            info for info in ended if info is not None and info.seqnum < floor and wanted.has(info)
        ]
    found.sort(key=lambda info: info.place().key)
    return found[:limit]


# --- where a list begins


async def _first_bound(log: Log, wanted: RunFilter) -> SeqNum:
    """Return a seqnum above which the filter wants no run."""
    times = [wanted.time_max] if wanted.time_max is not None else []
    bound = MAX_SEQNUM
    if wanted.after is not None:
        time, app, name, seqnum = wanted.after
        if (app, name) == (wanted.app, wanted.log):
            bound = max(-1, -seqnum - 1)
        else:
            times.append(-time)
    if times:
        bound = min(bound, await log.find_time(max(0.0, min(times) + _TICK_S)))
    return bound


def _page_size(wanted: RunFilter, missing: int) -> int:
    """Return how many records one read asks for. It is more if only few records fit the filters."""
    is_rare = wanted.id_prefix or wanted.version is not None
    return runs.RUNS_MAX if is_rare else max(missing, _PAGE_MIN)
