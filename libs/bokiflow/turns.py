"""The limits of the runs of this process: finds out which of its runs have their turn.

A limit is opened when a run with this limit is in a partition of this process. From then on, each
record that may free a place arrives with the inbox, so a waiting run needs no read of its own. If a
run waits only for the interval of its rate, the owner of the run appends a reminder when the
interval has passed.

`limits` has the records and the state of a limit. `taking` makes a `Turns` and executes the runs
that get their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog
from cachetools import LRUCache

from bokiflow.limits.limit_state import LimitedRun, LimitState, Turn, limit_stream
from bokiflow.ownership.crash_loops import Tasks
from bokiflow.ownership.executor import Executor
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.ownership.skip_unreadable import catch_up_readable
from bokiflow.runs import waiting
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    INBOX_TAG,
    LimitReminded,
    LimitSettings,
    RetryAsked,
    RunForgotten,
    encode,
    limit_tag,
    partition_of,
    run_tag,
)
from bokiflow.runs.run_log import append_with_retry
from bokiflow.runs.run_state import RunState
from bokiflow.versions import Versions
from indilog import Entry, IndilogError, Log
from indilog.replayed import Replica

_LIMITS_MAX: Final = 4096
"""Largest number of limits in memory; the least recently used is dropped first."""
_TICK_S: Final = 0.005
_PROBLEM_S: Final = 1.0
_SAVE_EVERY: Final = 256


class LimitExecutor(Executor):
    """The part of an executor that its limits need: the workflows.

    Attributes:
        definitions: the workflows of this process's code, by name.
        versions: the workflows, in all deployments that are loaded here.
    """

    def __init__(self, log_name: str, lease_s: float, partitions: int, versions: Versions) -> None:
        super().__init__(log_name, lease_s, partitions)
        self.definitions = versions.definitions
        self.versions = versions


class _Opened:
    """A limit in this process.

    Attributes:
        is_due: whether records of the limit must be read.
        has_settings: whether the settings of this process's code are known to be in the log.
        changed: set when records of the limit were read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.replica: Replica[LimitState, None] = Replica(
            limit_stream(name), LimitState, LimitState.restore
        )
        self.is_due = False
        self.has_settings = False
        self.changed = asyncio.Event()

    @property
    def state(self) -> LimitState:
        """The runs of the limit, after the records read so far."""
        return self.replica.state


class Turns:
    """Gives runs of this process their turn.

    Args:
        executor: the executor of this process.
        on_turn: called with each run of an owned partition that has got its turn, or must be ended.
            Its second argument tells whether the run was parked.
    """

    def __init__(self, executor: LimitExecutor, on_turn: Callable[[str, bool], None]) -> None:
        self._executor = executor
        self._on_turn = on_turn
        self._opened: LRUCache[str, _Opened] = LRUCache(_LIMITS_MAX)
        self._tasks = Tasks()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks that wait for turns."""
        return self._tasks.tasks()

    @property
    def has_work(self) -> bool:
        """Whether the next turns of a limit are being found. A parked run may get a turn."""
        return any(f"look {name}" in self._tasks for name in self._opened)

    async def stop(self) -> None:
        """Stop giving turns."""
        await self._tasks.stop()

    def _open(self, name: str) -> _Opened:
        opened = self._opened.get(name)
        if opened is None:
            opened = self._opened[name] = _Opened(name)
        return opened

    def _partition(self, id_: str) -> OwnedPartition | None:
        return self._executor.owned.get(partition_of(id_, self._executor.member.count))

    # --- reading

    async def read(self, log: Log, name: str) -> LimitState:
        """Return the runs of a limit, after all records that the session of `log` sees."""
        opened = self._open(name)
        await catch_up_readable(opened.replica, log)
        return opened.state

    def is_full(self, name: str) -> bool:
        """Tell whether a further run would be refused, because too many runs are known to wait."""
        opened = self._opened.get(name)
        return opened is not None and opened.state.is_full

    def on_record(self, name: str) -> None:
        """Note that the inbox has a record of a limit."""
        if name in self._opened:
            self.look(name)

    def look(self, name: str) -> None:
        """Find out soon which runs of this process have their turn."""
        opened = self._open(name)
        opened.is_due = True
        self._tasks.begin(f"look {name}", partial(self._look_until_done, opened))

    async def _look_until_done(self, opened: _Opened) -> None:
        while opened.is_due:
            opened.is_due = False
            try:
                await self._look(opened)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor waits for the log", reason=str(error))
                opened.is_due = True
                await waiting.pause(_PROBLEM_S)

    async def _look(self, opened: _Opened) -> None:
        executor = self._executor
        if executor.logs is None or not executor.owned:
            return
        log = executor.own_log(executor.logs)
        await catch_up_readable(opened.replica, log)
        await self._set(log, opened)
        state = opened.state
        while state.granted:
            id_ = next(iter(state.granted))
            await self._notify(log, id_, state.runs[id_])
            state.granted.pop(id_, None)
        for id_ in list(state.ended_at_start):
            if self._partition(id_) is not None:
                self._on_turn(id_, False)  # noqa: FBT003
        opened.changed.set()
        if state.next_due() is not None:
            self._tasks.begin(f"remind {opened.name}", partial(self._remind, log, opened))

    async def _notify(self, log: Log, id_: str, run: LimitedRun) -> None:
        partition = self._partition(id_)
        if partition is None:
            return
        if run.epoch:  # it was executed before, so it may be parked
            await partition.catch_up(log)
        self._on_turn(id_, id_ in partition.state.parked)

    async def _set(self, log: Log, opened: _Opened) -> None:
        """Record the settings of this process's code once, if the settings in the log differ."""
        definition = self._executor.definitions.get(opened.name)
        if opened.has_settings or definition is None or not opened.state.runs:
            return
        limit = definition.limit
        settings = LimitSettings() if limit is None else limit.settings
        if settings != opened.state.settings:
            await self._append(log, opened, LimitReminded(settings))
        opened.has_settings = True

    async def _append(self, log: Log, opened: _Opened, reminded: LimitReminded) -> None:
        entry = Entry(encode(reminded), (limit_tag(opened.name), INBOX_TAG))
        seqnum = await append_with_retry(log, [entry])
        await catch_up_readable(opened.replica, log, seqnum)

    async def _remind(self, log: Log, opened: _Opened) -> None:
        """Append a reminder when the next run is due by its interval, unless another record of the
        limit has arrived before. Repeat this while runs wait for the interval.

        For a run in a partition of another process, the reminder is appended a lease later. By
        then, the other process has appended its own reminder or has crashed.
        """
        while self._executor.owned and (due := opened.state.next_due()) is not None:
            at, id_ = due
            wait_s = at - log_clock(log).now()
            if self._partition(id_) is None:
                wait_s += self._executor.member.lease.lease_s
            opened.changed.clear()
            try:
                async with asyncio.timeout(max(_TICK_S, wait_s)):
                    await opened.changed.wait()
                continue
            except TimeoutError:
                pass
            try:
                await self._append(log, opened, LimitReminded())
                await self._look(opened)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor waits for the log", reason=str(error))
                await waiting.pause(_PROBLEM_S)

    # --- single runs

    async def find(self, log: Log, id_: str, run: RunState) -> LimitedRun | None:
        """Return a run as its limit knows it. For a parked run, request a turn first. None: the
        limit cannot count the run, because records of the run in the limit are lost.
        """
        assert run.started is not None, "only a run that has begun has a limit"
        assert run.started.limit is not None, "only a limited run waits for a turn"
        name = run.started.limit.name
        state = await self.read(log, name)
        known = state.runs.get(id_)
        if known is None or known.started_at != run.started_at:
            structlog.get_logger().error("run is not known to its limit", run=id_, limit=name)
            return None
        if known.turn == Turn.PARKED:
            tags = (run_tag(id_), limit_tag(name), INBOX_TAG)
            await append_with_retry(log, [Entry(encode(RetryAsked()), tags)])
            state = await self.read(log, name)
            known = state.runs.get(id_, known)
            state.granted.pop(id_, None)
        return known

    # --- periodic work

    def tidy(self) -> None:
        """Check the turns of runs of this process, and save checkpoints, after a heartbeat."""
        for opened in list(self._opened.values()):
            self._tasks.begin(f"tidy {opened.name}", partial(self._tidy, opened))

    async def _tidy(self, opened: _Opened) -> None:
        executor, state = self._executor, opened.state
        if executor.logs is None:
            return
        log = executor.own_log(executor.logs)
        try:
            for id_, run in [(id_, state.runs[id_]) for id_ in state.having]:
                if (partition := self._partition(id_)) is not None and partition.is_loaded:
                    await self._check(log, opened, id_, run, partition)
            first = next(iter(state.runs), None)
            is_due = opened.replica.unsaved >= max(_SAVE_EVERY, state.size // 4)
            if first is not None and is_due and self._partition(first) is not None:
                await opened.replica.save(log)
        except (IndilogError, Stopped) as error:
            structlog.get_logger().warning("executor waits for the log", reason=str(error))

    async def _check(
        self, log: Log, opened: _Opened, id_: str, run: LimitedRun, partition: OwnedPartition
    ) -> None:
        """Free the place of a run that is not open: its start repeated an earlier start, or was the
        start of another workflow with the same id.
        """
        known = partition.state.runs.get(id_)
        if known is None or known.started_at != run.started_at:
            await partition.catch_up(log)
            known = partition.state.runs.get(id_)
            is_void = known is None or known.started_at != run.started_at
            if is_void and opened.state.runs.get(id_) is run:
                forgotten = Entry(encode(RunForgotten(id_, run.started_at)), (
                    limit_tag(opened.name), INBOX_TAG,
                ))  # fmt: skip
                await append_with_retry(log, [forgotten])
                self.look(opened.name)
        elif not known.epoch:
            self._on_turn(id_, False)  # noqa: FBT003 - it should have been taken
