"""Runs recorded invocations on one compute node.

`InvocationService` follows the log `$invocations` and applies its records to the `InvocationTable`.
It performs the actions of the node's `InvocationExecutor`. It also answers callers that start,
cancel or query invocations; these callers are `FunctionHost` (`workers.host`) and the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final

import structlog

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    CallOutcomeUnknownError,
    DataLossError,
    IndilogError,
    InvocationCancelledError,
    NotReadyError,
    OverloadedError,
)
from indilog.base.ids import MAX_SEQNUM, MetalogPosition, SeqNum
from indilog.base.log import Entry, LogSource, Record, Session
from indilog.base.subscription import pages
from indilog.config import NodeConfig
from indilog.link.link_messages import Failed, Returned
from indilog.sdk.log_clock import LogClock
from indilog.sdk.losses import Losses
from indilog_compute.invocations.admission import Admission, OpenLimits
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.checkpoints import CheckpointLog
from indilog_compute.invocations.executor import (
    Abandon,
    Action,
    Append,
    Begin,
    InvocationExecutor,
    Now,
    WriteCheckpoint,
)
from indilog_compute.invocations.fault_log import FaultLog
from indilog_compute.invocations.held_invocations import HeldFor, HeldLimits
from indilog_compute.invocations.invocation_list import InvocationFilter, InvocationInfo, newest
from indilog_compute.invocations.invocation_status import InvocationStatus, forgotten, read_status
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.keys import check_holder, check_key, known_with
from indilog_compute.invocations.outcome_waiters import OutcomeWaiters
from indilog_compute.invocations.records import (
    INVOCATIONS_LOG,
    Checkpointed,
    Failure,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
    application_of,
    decode,
    encode,
    held_stream,
    stream_of,
)
from indilog_compute.invocations.runs import CallT, InvocationRuns, StartCall, outcome_in
from indilog_compute.invocations.scheduling import DeployedSchedule, Schedules

_AGAIN_S: Final = 1.0
"""Seconds until a failed read or append is retried."""
_ENTRIES_MAX: Final = 100
"""Largest number of records in one append, so that they fit into the smallest allowed batch."""


class InvocationService:
    """Runs invocations on one compute node, and returns the outcome of any invocation.

    Args:
        node: name of the compute node. The executors of its earlier incarnations count as dead when
            the service starts. None: no executor counts as dead then.
        rank: returns the index of this node among all compute nodes, from 0.
        record_bytes_max: largest number of data bytes in a record, for checkpoints.
        start: starts a call of a function on this node.
        stop: stops a call that `start` returned.
        is_shared: returns whether several applications are deployed.
    """

    def __init__(
        self,
        logs: LogSource,
        config: NodeConfig,
        *,
        node: str | None,
        rank: Callable[[], int] = lambda: 0,
        record_bytes_max: int,
        start: StartCall[CallT],
        stop: Callable[[CallT], None],
        is_shared: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config = config
        self._node = node or secrets.token_hex(6)
        self._session = Session()
        self._log = logs.log(INVOCATIONS_LOG, self._session)
        self._table = InvocationTable(_limits(config))
        self._schedules = Schedules(rank, config)
        self._executor = InvocationExecutor(self._new_name(), self._table, self._schedules, config)
        self._runs = InvocationRuns(self._log, start, stop, lambda: self._executor.name)
        self._waiters = OutcomeWaiters(
            config.functions.calls_pending_max,
            share_max=config.functions.app_pending_share_max,
            is_shared=is_shared,
        )
        self._checkpoints = CheckpointLog(
            self._log,
            self._waiters,
            current=lambda: self._table,
            record_bytes_max=record_bytes_max,
        )
        self._clock = LogClock(_passed_s)
        self._deployed_schedules: tuple[DeployedSchedule, ...] = ()
        self._has_work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._read_to: SeqNum | None = None
        self._disagreed = self._skipped = ""
        self._broken: IndilogError | None = None
        self._admission = Admission(OpenLimits.of(config))
        self._held_limits = HeldLimits.of(config)
        self._lost_to: SeqNum = 0
        self._losses = Losses(
            "invocations", "Calls accepted there do not run; calls that ended there may run again."
        )
        self._declared_dead = 0
        self._read_faults, self._round_faults = FaultLog(_AGAIN_S), FaultLog(_AGAIN_S)

    async def start(self) -> None:
        """Restore the newest checkpoint; then begin to read the log and to run invocations.

        Raises:
            NotReadyError: the log cannot be read.
        """
        await self._restore()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow()), loop.create_task(self._run_rounds())]

    async def stop(self) -> None:
        """Stop, and free running invocations, so that executors run them again."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        open_ = self._table.open
        await self._runs.stop([open_[id_] for id_ in self._executor.begun if id_ in open_])

    # --- starting invocations

    async def accept(
        self,
        function: str,
        arguments: bytes,
        *,
        position: MetalogPosition = 0,
        depth: int = 0,
        delay_s: float = 0.0,
        key: str = "",
        holder: str = "",
    ) -> str:
        """Record an invocation of `function` that is due in `delay_s` seconds; return its id.

        Of all invocations of the function with the same `key`, only the first recorded one runs,
        and its id is returned. If there is a `holder`, the outcome is held until `release`, without
        a limit in time.

        Raises:
            InvalidArgumentsError: the key was used with other arguments, or the key or the holder
                is invalid.
            OverloadedError, NotReadyError: nothing was done; try again later.
            CallOutcomeUnknownError: the function may or may not run.
        """
        check_key(function, key)
        check_holder(function, key, holder)
        if (known := self.known(function, arguments, key)) is not None:
            return known
        self._check_followed()
        if holder:
            self._table.held.check_room(application_of(function), self._held_limits)
        event = InvocationAccepted(
            id=secrets.token_hex(12),
            executor=self._executor.name,
            function=function,
            arguments=arguments,
            position=position,
            stream=held_stream(holder) if holder else stream_of(delay_s, key),
            delay_s=delay_s,
            depth=depth,
            key=key,
            holder=holder,
        )
        if not key:
            await self._append_accepted(event)
            return event.id
        with self._waiters.reserve_record_wait():  # before anything is appended
            seqnum = await self._append_accepted(event)
        await self._waiters.wait_for_record(seqnum, self._table.end)
        decided = self.known(function, arguments, key)
        if decided is None:
            raise CallOutcomeUnknownError(
                f"{function} was recorded, but its key is already deleted; "
                "results_kept_max or results_kept_s is too small."
            )
        return decided

    def known(self, function: str, arguments: bytes, key: str) -> str | None:
        """Return the id of the invocation of `function` with this key, as of the records read here;
        None if there is no such invocation, or if `key` is empty.

        Raises:
            InvalidArgumentsError: the key was used with other arguments.
        """
        return known_with(self._table, function, arguments, key)

    async def known_by_now(self, function: str, arguments: bytes, key: str) -> str | None:
        """Read all records that any node appended before this call; then return the result of
        `known`.

        Raises:
            InvalidArgumentsError: the key was used with other arguments.
            OverloadedError, NotReadyError, QuorumUnavailableError: not all of these records could
                be read; try again later.
        """
        self._check_followed()
        await self._read_up_to_now()
        return known_with(self._table, function, arguments, key)

    async def _append_accepted(self, event: InvocationAccepted) -> SeqNum:
        application = application_of(event.function)
        self._admission.admit(application, self._table.open_by_application)
        try:
            seqnum = await self._log.append(encode(event), tags=[event.stream])
        except BaseException as error:
            self._admission.withdraw(application)
            if isinstance(error, AppendOutcomeUnknownError):
                raise CallOutcomeUnknownError(
                    f"It is not known whether {event.function} was recorded to run: {error}"
                ) from error
            raise
        self._admission.appended(application, seqnum)
        self._admission.read(
            self._table.end
        )  # the record may have been read before this task resumed
        return seqnum

    def _check_followed(self) -> None:
        if self._broken is not None:
            raise NotReadyError(f"Invocations are not run here: {self._broken}")

    async def cancel(self, id: str) -> InvocationStatus | None:  # noqa: A002 - the field's name
        """Durably cancel an invocation. Return its status afterwards; None: the id is unknown.

        A waiting invocation never begins. A running invocation is stopped, and may have had
        effects. An ended invocation does not change.

        Raises:
            OverloadedError, NotReadyError, QuorumUnavailableError: nothing was done.
            AppendOutcomeUnknownError: the invocation may be cancelled; a repeated call is harmless.
        """
        found = self._table.get(id)
        if found is None:
            await self._read_up_to_now()
            found = self._table.get(id)
        if found is not None and found.ended is None:
            ended = InvocationEnded(self._executor.name, id, 0, None, _cancelled(found))
            with self._waiters.reserve_record_wait():
                seqnum = await self._log.append(encode(ended), tags=[found.stream])
            await self._waiters.wait_for_record(seqnum, self._table.end)
            found = self._table.get(id)
        return await read_status(self._log, found) if found is not None else None

    def release(self, holder: str, keys: Iterable[str]) -> None:
        """Release the outcomes that are held for `holder` under `keys`; if `keys` is empty, release
        all outcomes of the holder. Released outcomes are kept like other outcomes.

        This node appends the record of the release within about a second. If it crashes before, or
        has not read the record of a call yet, the outcome stays held. Then the holder must release
        it again.
        """
        ids = [held.id for held in self._table.held.of(holder, keys)]
        if self._executor.release(ids, time.monotonic()):
            self._has_work.set()

    async def holders(self, prefix: str, after: str = "") -> tuple[list[str], MetalogPosition]:
        """Return a page of at most 1,000 holders of outcomes, ascending, and a metalog position.

        A session at this position can read all records that the holders appended before their
        calls.

        Args:
            prefix: only holders whose names begin with `prefix` are returned.
            after: only holders whose names are greater than `after` are returned.

        Raises:
            NotReadyError, QuorumUnavailableError: the log cannot be read now.
        """
        self._check_followed()
        await self._read_up_to_now()
        return self._table.held.holders(prefix, after), self._session.position

    async def held(self, prefix: str, after: str = "") -> list[HeldFor]:
        """Return at most 1,000 holders, ascending, with the number and the size of their held
        invocations. Their names begin with `prefix` and are greater than `after`.

        Raises:
            NotReadyError, QuorumUnavailableError: the log cannot be read now.
        """
        self._check_followed()
        await self._read_up_to_now()
        return self._table.held.summary(prefix, after)

    async def release_held(self, prefix: str) -> int:
        """Release all outcomes that are held for holders whose names begin with `prefix`; return
        the number of released outcomes.

        This node appends the records of the release within about a second, unless it crashes
        before.

        Raises:
            NotReadyError, QuorumUnavailableError: the log cannot be read now.
        """
        released, after = 0, ""
        while page := await self.held(prefix, after):
            for one in page:
                self.release(one.holder, ())
            released += sum(one.calls for one in page)
            after = page[-1].holder
        return released

    def open_of(self, application: str) -> int:
        """Return the number of open invocations of an application."""
        return self._table.open_by_application[application]

    @property
    def not_started(self) -> int:
        """Number of invocations that this node's executor runs without having called the function
        yet.
        """
        own = self._table.executors.get(self._executor.name)
        return max(0, (len(own.ids) if own is not None else 0) - self._runs.calling)

    # --- status and outcomes

    async def newest(self, wanted: InvocationFilter, limit: int) -> list[InvocationInfo]:
        """Return at most `limit` invocations, newest first: the newest ones that are open or kept
        and that `wanted` selects. They include invocations that other nodes recorded before this
        call.

        Raises:
            NotReadyError, QuorumUnavailableError: the log cannot be read now.
        """
        await self._read_up_to_now()
        return await newest(self._table, wanted, limit, partial(asyncio.sleep, 0))

    async def status_of(self, id: str, *, wait_s: float = 0.0) -> InvocationStatus | None:  # noqa: A002 - the field's name
        """Wait up to `wait_s` seconds for the outcome of an invocation; then return its status.
        None: the invocation never existed, or is no longer kept.

        Raises:
            DataLossError: the invocation is unknown, and records of invocations are lost.
        """
        found = self._table.get(id)
        if found is None:
            await self._read_up_to_now()
            found = self._table.get(id)
        if found is None:
            if self._losses:
                raise DataLossError(f"Invocation {id} is not known. {self._losses.sentence}")
            return None
        if found.ended is None and wait_s > 0:
            room = self._waiters.reserve_outcome_wait(application_of(found.function))
            with suppress(TimeoutError, OverloadedError), room:
                async with asyncio.timeout(wait_s):
                    await self._waiters.wait_for_outcome(id)
            found = self._table.get(id) or found
        return await read_status(self._log, found)

    async def outcome(self, id: str) -> Returned | Failed:  # noqa: A002 - the field's name
        """Wait for the outcome of an invocation without a time limit, and return the outcome.
        Before the call, the caller must reserve room (`reserve_outcome_wait`).

        Raises:
            CallOutcomeUnknownError: the outcome of the invocation is no longer kept.
            NotReadyError, QuorumUnavailableError: the log cannot be read; the invocation continues.
        """
        if self._table.get(id) is None:
            await self._read_up_to_now()
        while True:
            found = self._table.get(id)
            if found is None:
                raise forgotten(id)
            if found.ended is None:
                if (event := await self._waiters.wait_for_outcome(id)) is not None:
                    return outcome_in(event)
                continue
            status = await read_status(self._log, found)
            # Trimmed, because other nodes no longer keep it.
            if status is None or status.outcome is None:
                raise forgotten(id)
            return status.outcome

    def reserve_outcome_wait(self, function: str) -> AbstractContextManager[None]:
        """Reserve room for a caller that waits for an outcome of `function`.

        Raises:
            OverloadedError: too many callers wait already.
        """
        return self._waiters.reserve_outcome_wait(application_of(function))

    async def _read_up_to_now(self) -> None:
        """Wait until this node has read all records that were acknowledged before this call."""
        last = await self._find_last(fresh=True)
        if last is not None:
            await self._waiters.wait_for_record_bounded(last, self._table.end)

    async def _find_last(self, *, fresh: bool) -> SeqNum | None:
        """Return the seqnum of the last readable record; None: there is no readable record."""
        bound = MAX_SEQNUM
        while True:
            try:
                last = await self._log.read_prev(bound=bound, fresh=fresh)
            except DataLossError as error:
                if error.seqnum is None or error.seqnum > bound:
                    raise
                if not error.seqnum:
                    return None
                bound = error.seqnum - 1
            else:
                return last.seqnum if last is not None else None

    def schedule(self, schedules: Iterable[DeployedSchedule]) -> None:
        """Run exactly these schedules from now on."""
        self._deployed_schedules = tuple(schedules)
        self._take_schedules()
        self._has_work.set()

    def _take_schedules(self) -> None:
        if self._clock.has_begun:
            self._schedules.take(self._deployed_schedules, ahead_s=time.time() - self._clock.now())

    def schedules(self) -> list[dict[str, Any]]:
        """Return the last and next due time of each schedule, in ISO 8601."""
        return self._schedules.status(self._table, time.time())

    async def ask_time(self) -> None:
        """Ask the log for its time, and begin the invocations that are due by this time. Tests call
        this method after they let time pass.

        Raises:
            NotReadyError, QuorumUnavailableError: the log does not answer.
        """
        await self._clock.ask(self._log)
        self._has_work.set()

    def status(self) -> dict[str, Any]:
        """Return state and counters for `/status` and `/metrics`."""
        open_ = self._table.open.values()
        return {
            "open": len(open_),
            "scheduled": sum(i.executor is None for i in open_),
            "running_here": len(self._executor.begun),
            "results_kept": self._table.kept,
            "held": self._table.held.total,
            "held_bytes": self._table.held.size,
            "rerun": self._runs.rerun,
            "executors_declared_dead": self._declared_dead,
            "lost_ranges": len(self._losses),
        }

    # --- internal

    def _new_name(self) -> str:
        return f"{self._node}#{secrets.token_hex(6)}"

    async def _follow(self) -> None:
        while True:
            try:
                if not await self._read_on():
                    await self._restore()
            except Exception as error:  # noqa: BLE001 - outermost: reading must continue
                self._read_faults.log_if_due("invocations not followed", error, time.monotonic())
                self._broken = _broken_by(error)
                await asyncio.sleep(_AGAIN_S)

    async def _read_on(self) -> bool:
        """Apply records until a read reports lost records; then skip the lost records. False: this
        node has missed records that are trimmed, so it must restore a checkpoint.
        """
        try:
            async for page in pages(self._log, None, max(self._table.end, self._lost_to)):
                is_whole = self._apply_page(page)
                self._waiters.notify_read(self._table.end)
                self._admission.read(self._table.end)
                self._has_work.set()
                if not is_whole:
                    return False
                self._read_faults.end()
        except DataLossError as error:
            bound = max(self._table.end, self._lost_to)
            self._lost_to = self._losses.read_on_after(error, bound)
        return True

    async def _restore(self) -> None:
        """Restore the newest checkpoint, if there is one. The service performs no action until it
        has read the records that were in the log at this time.
        """
        found = await self._checkpoints.newest()
        await self._clock.begin(self._log)
        self._take_schedules()
        self._read_to = await self._find_last(fresh=False)
        if found is not None:
            end = found.checkpoint.end
            structlog.get_logger().info("invocations read from a checkpoint", end=end)
            self._table = InvocationTable.restored(_limits(self._config), found)
            self._executor.use_table(self._table)
            self._waiters.notify_all()
        self._skipped = self._disagreed

    def _apply_page(self, page: Sequence[Record]) -> bool:
        """Apply the records of a page; False: a checkpoint in the page shows that this node missed
        earlier records.
        """
        for record in page:
            event = decode(record.data)
            if event is None:
                structlog.get_logger().error(
                    "invocation record not understood", seqnum=record.seqnum
                )
            if isinstance(event, Checkpointed) and not self._agrees(event):
                return False
            self._clock.read(record.ordered_at)
            self._table.apply(record.seqnum, record.ordered_at, event)
            self._broken = None
            if isinstance(event, InvocationEnded):
                self._waiters.notify_outcome(event)
        return True

    def _agrees(self, event: Checkpointed) -> bool:
        """Whether a checkpoint agrees with the table, or disagrees and cannot be restored."""
        if self._table.agrees(event):
            return True
        if event.id != self._skipped:  # otherwise `_restore` has skipped it already
            self._disagreed = event.id
            return False
        structlog.get_logger().error("a checkpoint is lost; continuing without it", end=event.end)
        return True

    async def _run_rounds(self) -> None:
        """Perform the actions of the executor, and wait for more, until this task is cancelled."""
        while True:
            self._has_work.clear()
            try:
                did = await self._run_round()
            except Exception as error:  # noqa: BLE001 - outermost: the next round may succeed
                self._round_faults.log_if_due("invocations not advanced", error, time.monotonic())
                await asyncio.sleep(_AGAIN_S)
                continue
            self._round_faults.end()
            if not did:
                await self._wait_for_work()

    async def _run_round(self) -> bool:
        """Perform the current actions; return whether a record was appended."""
        if self._read_to is not None:
            await self._waiters.wait_for_record(self._read_to, self._table.end)
        if self._table.is_declared_dead(self._executor.name):
            structlog.get_logger().warning(
                "declared dead by another node; continuing under another name"
            )
            self._declared_dead += 1
            for abandon in self._executor.rename(self._new_name()):
                self._runs.abandon(abandon.id)
        actions = self._executor.actions(self._now())
        entries = [entry for action in actions if (entry := self._perform(action)) is not None]
        places: list[SeqNum] = []
        for start in range(0, len(entries), _ENTRIES_MAX):
            places += await self._log.append_batch(entries[start : start + _ENTRIES_MAX])
        if places:
            await self._waiters.wait_for_record(places[-1], self._table.end)
            self._executor.note_recorded(time.monotonic())
            if self._claimed_too_early(actions):
                await self._clock.ask(self._log)
        if WriteCheckpoint() in actions:  # last, so that its failure delays nothing
            await self._checkpoints.write()
        return bool(entries)

    def _claimed_too_early(self, actions: Sequence[Action]) -> bool:
        """Whether an action claims an invocation that was not due at the log's time of the
        claim.
        """
        table = self._table
        claims = (a.event for a in actions if isinstance(a, Append))
        ids = [
            id_ for claim in claims if isinstance(claim, InvocationsClaimed) for id_ in claim.ids
        ]
        return any(id_ in table.open and table.open[id_].due > table.clock for id_ in ids)

    def _now(self) -> Now:
        return Now(time.monotonic(), self._clock.now(), time.time())

    def _perform(self, action: Action) -> Entry | None:
        """Perform an action, or return the record to append for it."""
        match action:
            case Begin(invocation):
                self._runs.begin(invocation)
                self._executor.begun.add(invocation.id)
            case Abandon(id_):
                self._runs.abandon(id_)
                self._executor.begun.discard(id_)
            case Append(event, tags):
                return Entry(encode(event), tags)
            case WriteCheckpoint():
                pass
        return None

    async def _wait_for_work(self) -> None:
        """Wait for a record, or until the next action is due."""
        with suppress(TimeoutError):
            # not `wait_for`, which may lose a cancellation
            async with asyncio.timeout(self._executor.rest_s(self._now())):
                await self._has_work.wait()


def _passed_s() -> float:
    """Return monotonic seconds, which also count while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _broken_by(error: Exception) -> IndilogError | None:
    """Return the permanent problem that `error` shows; None if `error` may be transient."""
    if isinstance(error, IndilogError):
        return None if error.retryable else error
    return IndilogError(f"{type(error).__name__}; the log says why.")


def _limits(config: NodeConfig) -> TableLimits:
    return TableLimits(
        results_kept_s=config.invocations.results_kept_s,
        results_kept_max=config.invocations.results_kept_max,
        keys_kept_max=config.invocations.keys_kept_max,
        results_kept_bytes_max=config.invocations.results_kept_bytes_max,
        retry_s_min=config.invocations.invocation_retry_s_min,
        retry_s_max=config.invocations.invocation_retry_s_max,
        app_kept_share_max=config.invocations.app_kept_share_max,
    )


def _cancelled(invocation: RecordedInvocation) -> Failure:
    """Return the failure of a cancelled invocation.

    The invocation may have begun before the cancellation is recorded, so the text covers both
    cases.
    """
    sentence = (
        f"{invocation.function} was cancelled; if it had begun, it was asked to stop, and may have "
        "had effects."
    )
    return Failure(InvocationCancelledError.__name__, sentence, {})
