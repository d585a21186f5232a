"""Runs the core of a log over cells on the event loop: requests, timers, caches.

A driver serves all sessions of one log in one process. Several processes may have drivers of one
log. If `is_shared` is not set, this process is the only one. Then the log has no acknowledged
records that the driver has not applied, so reads need not look for new cells.

Below a driver is the storage of the log (`cells`); above it is the `Log` interface (`log`,
`lookups`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias

import structlog
from cachetools import LRUCache

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DataLossError,
    DiskFullError,
    IndilogError,
    MalformedFrameError,
    NotReadyError,
    OverloadedError,
    SealedError,
)
from indilog.base.recent_failure import RecentFailure
from indilog.roles.disk_full import no_room_on
from indilog_cells.cells import CellsAndNotes, CellsError
from indilog_cells.closed_generations import ClosedGenerations, TrimmedCellError
from indilog_cells.content import Content, Item, Records, decode
from indilog_cells.core import CORE_LIMITS, Core, CoreLimits
from indilog_cells.core_events import (
    AppendsElsewhere,
    AskToken,
    CaughtUp,
    CellDeposed,
    CellFailed,
    CellRead,
    CellTaken,
    CellWritten,
    ContentAnswered,
    ContentApplied,
    Effect,
    Event,
    FellBehind,
    ItemApplied,
    ReadCell,
    SendContent,
    TokenFailed,
    TokenGiven,
    WriteCell,
)
from indilog_cells.outcomes import AppendedContent
from indilog_cells.owned_cells import DeposedError, Elsewhere, OwnedCells
from indilog_cells.sequencer import TokenSequencer
from indilog_cells.state import Closed, LogState, Outcome

_WRITER_BYTES: Final = 8
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 60.0
_STOP_S: Final = 5.0

_log = structlog.get_logger(__name__)


FullDisks: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
"""Returns the places whose full disks stop a log from taking records; none: it takes records."""

SendToOwner: TypeAlias = Callable[[str, bytes], Awaitable[AppendedContent]]
"""Lets the owner of a log append a content. Raises `CellsError` if the outcomes are unknown; then
the owner may append it later.
"""


class Growth(Protocol):
    """What processes with drivers of one log tell each other, so that readers need not look for new
    cells all the time. It promises nothing: readers look once a second nevertheless.
    """

    async def elsewhere(self, position: int) -> bool:
        """Wait until another process says that it has applied more than `position` cells. False: no
        process said so for about a second.
        """

    def here(self, position: int) -> None:
        """Note that this process has applied `position` cells."""


_Write: TypeAlias = Callable[[int, bytes], Awaitable[bool]]


class CellDriver:
    """One log over cells, in this process; made by `driver_running`.

    Args:
        cells: the cells of the log.
        limits: limits of appends.
        cache_bytes_max: bytes of cached cells, at most; cached generations may take as many more.
        timeout_s: seconds after which a call fails.
        is_shared: whether other processes may write to the log too.
        clock: returns seconds since 1970.
        send_to_owner: only for `OwnedCells`: lets another process append.
        growth: what processes tell each other; None: nothing.
        full_disks: asked before records are appended; None: never.
    """

    def __init__(
        self,
        cells: CellsAndNotes,
        *,
        limits: CoreLimits,
        cache_bytes_max: int,
        timeout_s: float,
        is_shared: bool,
        clock: Callable[[], float],
        send_to_owner: SendToOwner | None = None,
        growth: Growth | None = None,
        full_disks: FullDisks | None = None,
    ) -> None:
        self.is_shared = is_shared
        self._failure = RecentFailure()
        self._cells = cells
        self._owned = cells if isinstance(cells, OwnedCells) else None
        self._send_to_owner = send_to_owner
        self._growth = growth
        self._full_disks = full_disks
        self._is_listening = False
        self._limits = limits
        self._timeout_s = timeout_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._core = Core(
            LogState(cells.generation_limits), secrets.token_bytes(_WRITER_BYTES), limits
        )
        self._sequencer = TokenSequencer()
        self._tickets = 0
        self._outcomes: dict[int, asyncio.Future[Outcome | None]] = {}
        self._acquiring: asyncio.Task[None] | None = None
        """The newest task that becomes the owner, or finds out which process is."""
        self._answered_position = 0
        self._received: dict[int, asyncio.Future[Sequence[Outcome] | None]] = {}
        self._caught_up: dict[int, asyncio.Future[None]] = {}
        self._watchers: dict[asyncio.Future[None], None] = {}
        """As an ordered set, like `_tasks`: so a simulation replays a run."""
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._contents: LRUCache[int, tuple[Content, int]] = LRUCache(
            cache_bytes_max, getsizeof=itemgetter(1)
        )
        self.generations = ClosedGenerations(
            cells,
            state=lambda: self._core.state,
            start=self._start,
            failed=self._failed,
            cache_bytes_max=cache_bytes_max,
        )
        self._error: IndilogError | None = None

    @property
    def state(self) -> LogState:
        """The state of the log as applied here. Do not keep it across an await: `_load` may replace
        it.
        """
        return self._core.state

    @property
    def seen_position(self) -> int:
        """How many cells the calls that have returned may have seen. The owner may have applied
        more of them than this process.
        """
        return max(self._core.state.position, self._answered_position)

    def now_us(self) -> int:
        """Return the time of this process, microseconds since 1970. It never goes back, and is at
        least the time of each applied cell.
        """
        core = self._core
        core.stamp_us = max(core.stamp_us, core.state.time_us, int(self._clock() * 1e6))
        return core.stamp_us

    @property
    def failure(self) -> str:
        """Why the log cannot be used: what ended this driver, or why the newest request to the
        storage of the log failed. Empty: nothing is known to be wrong.
        """
        return self._failure.text(self._loop.time()) if self._error is None else str(self._error)

    def _failed(self, error: CellsError) -> None:
        self._failure.note(str(error), self._loop.time())

    def check_open(self) -> None:
        """Raise the error that ended this driver, if any."""
        if self._error is not None:
            raise self._error

    # --- calls

    async def open(self) -> None:
        """Apply the newest checkpoint and all cells that are written.

        Raises:
            NotReadyError: the store does not answer.
            DataLossError: a cell, or the newest checkpoint, is damaged.
        """
        try:
            await self._load()
        except CellsError as error:
            raise NotReadyError(f"The log's store cannot be read: {error}.") from error
        await self.catch_up()
        self._start(self.generations.collect())

    async def _load(self) -> None:
        """Continue from the newest checkpoint, if it is newer than the applied state."""
        stored = await self._cells.newest_checkpoint()
        if stored is None:
            return
        try:
            state = LogState.restored(stored, self._cells.generation_limits)
        except MalformedFrameError as error:
            raise DataLossError(f"The log's newest checkpoint is damaged: {error}.") from error
        if state.position > self._core.state.position:
            self._perform(self._core.restart(state, self._time_us()))

    async def close(self) -> None:
        """Stop. Calls that wait fail with `NotReadyError`, or with `AppendOutcomeUnknownError` if
        their item is in a cell already.
        """
        self._fail(NotReadyError("The platform has stopped; open it again."))
        await self.generations.wait_stored(_STOP_S)
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, item: Item) -> Outcome:
        """Append an item; return its outcome.

        Raises:
            OverloadedError: too many items wait.
            DiskFullError: the item has records, and the disks of the log are full. Trims and
                policies still take effect.
            AppendOutcomeUnknownError: the store did not answer in time, or the driver was closed;
                the item may take effect.
            NotReadyError: the same, and the item never takes effect.
            DataLossError: a cell is damaged; the item may take effect.
        """
        if isinstance(item, Records):
            await self._check_disks()
        self.check_open()
        if not self._core.has_room or self.generations.are_too_many:
            raise OverloadedError(
                "The log's store is slower than the appends, and too many wait; nothing was "
                "appended."
            )
        ticket = self._ticket()
        waiter: asyncio.Future[Outcome | None] = self._loop.create_future()
        self._outcomes[ticket] = waiter
        self._core.submit(ticket, item)
        self._soon()
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await waiter
        except TimeoutError:
            if self._core.withdraw(ticket):
                raise NotReadyError(
                    f"The log's store did not answer within {self._timeout_s:g} s; nothing was "
                    "appended."
                ) from None
            raise AppendOutcomeUnknownError(
                f"The log's store did not answer within {self._timeout_s:g} s; the record may be "
                "in the log."
            ) from None
        finally:
            self._outcomes.pop(ticket, None)
        if outcome is None:
            raise AppendOutcomeUnknownError(
                "This process fell behind the log's trims; the record may be in the log."
            )
        return outcome

    async def _check_disks(self) -> None:
        """Check that the disks of the log have room for records. Else also refuse those that wait.

        Raises:
            DiskFullError: they have none.
        """
        if self._full_disks is None or not (places := await self._full_disks()):
            return
        error = no_room_on(*places)
        for ticket in self._core.withdraw_records():
            if (waiter := self._outcomes.get(ticket)) is not None and not waiter.done():
                waiter.set_exception(error)
        raise error

    async def append_content(self, owner: str, content: bytes) -> AppendedContent:
        """Append the content of another process, in the tenure `owner` of this process.

        Raises:
            SealedError: the tenure has ended. The content may be in a cell, and is not appended
                later.
            MalformedFrameError: it is no content.
        """
        self.check_open()
        decoded = decode(content)
        if decoded is None:
            raise MalformedFrameError("it holds junk instead of items")
        if self._acquiring is not None:
            await asyncio.wait([self._acquiring])  # others may know of a tenure before it begins
        if self._owned is None or not self._owned.appends_in(owner):
            raise SealedError("This process does not own the log.")
        ticket = self._ticket()
        waiter: asyncio.Future[Sequence[Outcome] | None] = self._loop.create_future()
        self._received[ticket] = waiter
        self._core.submit_content(ticket, decoded)
        self._soon()
        try:
            outcomes = await waiter
        finally:
            self._received.pop(ticket, None)
        if outcomes is None:
            raise SealedError("This process does not own the log any more.")
        return AppendedContent(self._core.state.position, outcomes)

    async def catch_up(self) -> None:
        """Apply every append that was complete, in any process, when this was called.

        Raises:
            NotReadyError: the store did not answer in time, or the driver was closed.
            DataLossError: a cell is damaged.
        """
        self.check_open()
        ticket = self._ticket()
        waiter = self._caught_up[ticket] = self._loop.create_future()
        self._core.catch_up(ticket)
        self._handle([])
        try:
            # Not `asyncio.timeout`: a read over a link begins outside of its task.
            await asyncio.wait([waiter], timeout=self._timeout_s)
            if not waiter.done():
                raise NotReadyError(
                    f"The log's store did not answer within {self._timeout_s:g} s; nothing was "
                    "read."
                )
            waiter.result()
        finally:
            self._core.abandon(ticket)
            self._caught_up.pop(ticket, None)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is resolved when the next cell is applied, another process says that
        there is one, or the driver fails. Call `unwatch` when it is resolved or no longer needed.
        """
        self.check_open()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._watchers[waiter] = None
        if self._growth is not None and not self._is_listening:
            self._is_listening = True
            self._start(self._listen(self._growth))
        return waiter

    def unwatch(self, waiter: asyncio.Future[None]) -> None:
        """Forget a future of `watch`."""
        self._watchers.pop(waiter, None)

    async def _listen(self, growth: Growth) -> None:
        """Wake the watchers when another process says that the log has grown; return when no
        watcher is left.
        """
        try:
            while any(not watch.done() for watch in self._watchers):
                if await growth.elsewhere(self.seen_position):
                    self._wake_watchers()
        finally:
            self._is_listening = False

    async def content(self, position: int) -> Content:
        """Return the content of an applied cell with records.

        Raises:
            TrimmedCellError: the cell is trimmed.
            NotReadyError: the store does not answer.
            MalformedFrameError: the cell is damaged.
        """
        if (cached := self._contents.get(position)) is not None:
            return cached[0]
        self.check_open()
        try:
            stored = await self._cells.read(position, is_applied=True)
        except CellsError as error:
            self._failed(error)
            raise NotReadyError(f"The log's store cannot be read: {error}.") from error
        if not stored:
            raise TrimmedCellError
        content = decode(stored)
        if content is None:
            raise MalformedFrameError("it holds junk instead of records")
        self._cache(position, content, len(stored))
        return content

    # --- inside

    def _cache(self, position: int, content: Content, size_bytes: int) -> None:
        if size_bytes <= self._contents.maxsize:
            self._contents[position] = content, size_bytes

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _time_us(self) -> int:
        return int(self._loop.time() * 1e6)

    def _soon(self) -> None:
        """Run the core in the next iteration of the event loop, so that appends of one iteration
        share a cell.
        """
        if self._turn is None:
            self._turn = self._loop.call_soon(self._handle, [])

    def _handle(self, events: Sequence[Event]) -> None:
        if self._error is not None:
            return
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self.now_us()
        before = self._core.state.position
        try:
            self._perform(self._core.handle(events, self._time_us()))
        except MalformedFrameError as error:
            place = self._core.state.position
            _log.exception("a cell is damaged", position=place)
            self._fail(DataLossError(f"A cell of the log from {place} on is damaged: {error}."))
            return
        if self._core.state.position > before:
            self.generations.free_trimmed()
            self._wake_watchers()
            if self._growth is not None:
                self._growth.here(self._core.state.position)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline_us := self._core.deadline_us()) is not None:
            self._timer = self._loop.call_at(deadline_us / 1e6, self._handle, [])

    def _perform(self, effects: Sequence[Effect]) -> None:  # noqa: C901, PLR0912 - one case an effect
        for effect in effects:
            match effect:
                case AskToken(at_least):
                    self._ask_token(at_least)
                case WriteCell(position, content):
                    self._start(self._write(self._writer(), position, content))
                case SendContent(owner, serial, content):
                    self._start(self._send(owner, serial, content))
                case ReadCell(position):
                    self._start(self._read(position))
                case ItemApplied(ticket, outcome):
                    if (waiter := self._outcomes.get(ticket)) is not None and not waiter.done():
                        waiter.set_result(outcome)
                case ContentApplied(ticket, outcomes):
                    received = self._received.get(ticket)
                    if received is not None and not received.done():
                        received.set_result(outcomes)
                case CaughtUp(ticket):
                    if (caught_up := self._caught_up.get(ticket)) is not None:
                        _resolve(caught_up)
                case FellBehind():
                    self._start(self._reload())
                case Closed():
                    self.generations.store(effect)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _ask_token(self, at_least: int) -> None:
        owned = self._owned
        if owned is None or owned.appends_in(owned.tenure.name):
            token = TokenGiven(self._sequencer.take(at_least))
            self._perform(self._core.handle([token], self._time_us()))
        else:
            self._acquiring = self._start(self._acquire(owned, at_least))

    async def _acquire(self, owned: OwnedCells, at_least: int) -> None:
        """Become the owner of the log, or find out which process is."""
        try:
            found = await owned.acquire()
        except CellsError as error:
            _log.warning("a log cannot be claimed for now", reason=str(error))
            self._failed(error)
            self._handle([TokenFailed()])
            return
        if isinstance(found, Elsewhere):
            self._handle([AppendsElsewhere(found.owner)])
            return
        begins = found != owned.tenure
        if begins:
            owned.tenure, self._sequencer = found, TokenSequencer()
        self._handle([TokenGiven(self._sequencer.take(at_least), begins)])

    async def _send(self, owner: str, serial: int, content: bytes) -> None:
        """Let the owner append a content."""
        owned, send = self._owned, self._send_to_owner
        assert owned is not None, "only an owned log has an owner"
        assert send is not None, "other processes may be the owner"
        try:
            position, outcomes = await send(owner, content)
        except CellsError as error:
            _log.warning("the owner of a log does not append", owner=owner, reason=str(error))
            owned.give_up_on(owner)
            self._handle([ContentAnswered(serial, None)])
            await self._refuse_on_full_disks()
            return
        self._answered_position = max(self._answered_position, position)
        self._handle([ContentAnswered(serial, outcomes)])
        self._wake_watchers()

    def _writer(self) -> _Write:
        """Return the function that writes a cell, in an owned log only in the tenure of now."""
        if self._owned is None:
            return self._cells.write
        return partial(self._owned.write_in, self._owned.tenure)

    async def _write(self, write: _Write, position: int, content: bytes) -> None:
        try:
            took = await write(position, content)
        except DeposedError as error:
            if self._owned is not None and self._owned.tenure == error.tenure:
                self._handle([CellDeposed(position)])
            return
        except CellsError as error:
            _log.warning("a cell cannot be written for now", position=position, reason=str(error))
            self._failed(error)
            self._handle([CellFailed(position, is_write=True)])
            await self._refuse_on_full_disks()
            return
        self._failure.clear()
        if took and (own := decode(content)) is not None:
            self._cache(position, own, len(content))
        self._handle([CellWritten(position, content) if took else CellTaken(position)])
        await self._refuse_on_full_disks()

    async def _refuse_on_full_disks(self) -> None:
        """Refuse the records that wait, if the disks are full."""
        if self._core.waiting:
            with contextlib.suppress(DiskFullError):
                await self._check_disks()

    async def _read(self, position: int) -> None:
        try:
            content = await self._cells.read(position)
        except CellsError as error:
            _log.warning("a cell cannot be read for now", position=position, reason=str(error))
            self._failed(error)
            self._handle([CellFailed(position, is_write=False)])
            return
        self._failure.clear()
        self._handle([CellRead(position, content)])

    async def _reload(self) -> None:
        """Continue from the newest checkpoint, because the next cell is trimmed."""
        before = self._core.state.position
        pause_s = _PAUSE_S
        while True:
            try:
                await self._load()
            except CellsError as error:
                _log.warning("no checkpoint can be read for now", reason=str(error))
                self._failed(error)
            except IndilogError as error:
                self._fail(error)
                return
            if self._core.state.position > before:
                self._handle([])
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _fail(self, error: IndilogError) -> None:
        self._error = self._error or error
        if self._timer is not None:
            self._timer.cancel()
        unknown = AppendOutcomeUnknownError(f"{self._error} The record may be in the log.")
        for ticket, outcome in self._outcomes.items():
            if not outcome.done():
                # A retryable error promises that nothing was done.
                may_be_there = self._error.retryable and not self._core.withdraw(ticket)
                outcome.set_exception(unknown if may_be_there else self._error)
        waiters: list[asyncio.Future[Any]] = [*self._caught_up.values(), *self._received.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self._error)
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for watch in self._watchers:
            _resolve(watch)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@asynccontextmanager
async def driver_running(
    cells: CellsAndNotes,
    *,
    limits: CoreLimits = CORE_LIMITS,
    cache_bytes_max: int = 64 * 1024 * 1024,
    timeout_s: float = 30.0,
    is_shared: bool = True,
    clock: Callable[[], float] = time.time,
    send_to_owner: SendToOwner | None = None,
    growth: Growth | None = None,
    full_disks: FullDisks | None = None,
) -> AsyncIterator[CellDriver]:
    """Open a log over cells while the block runs; arguments and errors are those of `CellDriver`
    and `CellDriver.open`.
    """
    assert 0 < timeout_s < math.inf, "calls have a deadline"
    driver = CellDriver(
        cells,
        limits=limits,
        cache_bytes_max=cache_bytes_max,
        timeout_s=timeout_s,
        is_shared=is_shared,
        clock=clock,
        send_to_owner=send_to_owner,
        growth=growth,
        full_disks=full_disks,
    )
    try:
        await driver.open()
        yield driver
    finally:
        await driver.close()
