"""The shell: it drives the roles of a process on an event loop (ARCHITECTURE 5).

One iteration of the loop takes all events that arrived. It calls each role once with its batch of
events, performs the effects, and repeats this until no role has events left. Then one sync makes
all written frames durable. After the sync the output of the iteration is sent: answers to callers
and messages to other processes. So a process is the unit of failure: its roles may be ahead of its
disk, but no other process notices (ARCHITECTURE 2). Only messages that promise nothing
(`Message.promises`) are sent before or during a sync. If a sync or a role fails, the shell ends,
without a retry.

If other processes run the rest of the cluster, no role of this process may rely on data that this
process has not synced (decision 0050). Otherwise an entry on another disk could depend on a batch
that this disk loses. So the promises of a role that persists are delivered only after the sync,
even to roles of the same process. Roles that do not persist then know only synced facts, so their
answers and messages leave at once.

Syncs run on the loop while they are fast (moving average below `sync_inline_s_max`), otherwise in a
thread. During a sync in the thread the loop continues; each output is sent after the sync that
covers it. One slow sync does not predict the next one. So each sync counts in the average for at
most twice `sync_inline_s_max`.

Messages for which no caller waits (not `Send.urgent`) are delivered after callers are answered, or
after `_LATER_S` at the latest. So index roles handle many appends together. A caller that needs
these messages, for example to read, ends the delay (`hasten`).

Messages between roles of one process are passed by reference. Messages to other processes travel in
one `Envelope` for each iteration and pair of nodes.

`assembly` and `node_process` create the shell, and `indilog_compute.local_log` wakes it. The shell
uses the journal, the transport, and the stores of snapshots, cells and cold objects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, assert_never

import structlog

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    NotReadyError,
)
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.base.metrics import Metrics
from indilog.config import Config
from indilog.kernel.cold import ColdAnswer
from indilog.kernel.index_snapshot import SnapshotAnswer
from indilog.kernel.view import Members, View, Views
from indilog.roles.role import (
    Answer,
    AnswerAppends,
    AskCells,
    AskCold,
    AskSnapshots,
    CellsAnswered,
    ColdAnswered,
    Discard,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    MembersWanted,
    Persist,
    Persisted,
    ReadFrame,
    Received,
    ReclaimableBytes,
    Role,
    Send,
    ServesCallers,
    Shrinks,
    SnapshotsAnswered,
    Started,
    SurvivesLoss,
    TermBegun,
)
from indilog.runtime.cell_store import CellStores
from indilog.runtime.cold_store import ColdStore
from indilog.runtime.ignored import count_effect, count_ignored
from indilog.runtime.journal.checkpointing import Checkpointing
from indilog.runtime.journal.disk_space import DiskSpace
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.rewriting import Rewriting
from indilog.runtime.snapshot_files import SnapshotFiles
from indilog.runtime.transport.fence import MALFORMED, Fence, RefusedFrame
from indilog.runtime.transport.outbox import Outbox
from indilog.runtime.transport.transport import Transport
from indilog.runtime.waiters import resolve, resolve_all, resolve_each, resolve_ordered
from indilog.wire.cell_messages import CellAnswer

_ROUNDS_MAX: Final = 10_000
"""Largest number of calls of roles in one iteration. Then the event loop runs other tasks."""
_AVERAGE_WEIGHT: Final = 0.05
_LATER_S: Final = 0.003
"""Longest time, in seconds, for which messages that are not urgent wait for answers to callers."""

log = structlog.get_logger(__name__)


class Clock:
    """Seconds since 1970: the wall clock at the start, plus the time that has passed since.

    Later changes of the wall clock have no effect. The clock also runs while the machine sleeps.

    Args:
        wall: a wall clock, in seconds since 1970; read once.
        passed: a clock in seconds that only grows and cannot be set.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        passed: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME),  # noqa: B008
    ) -> None:
        self._passed = passed
        self._offset = wall() - passed()

    def now(self) -> Instant:
        """Return the time."""
        return Instant(self._offset + self._passed())

    def skip(self, seconds: float) -> None:
        """Let this much time pass at once: for tests."""
        assert seconds >= 0, "time never goes back"
        self._offset += seconds


class NodeShell:
    """Runs the roles of one process. Call `start`, then `wake` after each direct call that gave a
    role work.

    Use it on its event loop only. `on_fatal` is called once, with the error that ended the shell.
    """

    def __init__(
        self,
        roles: Mapping[NodeId, Role],
        views: Views,
        config: Config,
        *,
        journal: Journal,
        transport: Transport | None = None,
        snapshots: Path | None = None,
        epoch: Epoch,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.roles = dict(roles)
        self.clock = Clock()
        self.metrics = Metrics("+".join(self.roles) if len(self.roles) == 1 else "embedded")
        self.failed: BaseException | None = None
        self.sync_average_s = 0.0
        self._views = views
        self._config = config
        self._journal = journal
        self._transport = transport
        self._epoch = epoch
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._streams = {node: stream_of(node) for node in self.roles}
        self._fence = Fence(self.roles, self._on_unknown_message)
        self._inbox: dict[NodeId, list[Event]] = {}
        self._later: dict[NodeId, list[Event]] = {}
        """Messages that are not urgent, until no other work is left or `_LATER_S` have passed."""
        self._later_since: Instant | None = None
        self._hastened = False
        """Whether `_later` is delivered without delay: a caller waits, or delivery has begun."""
        self._waiting, self._promising = self._roles_that_wait()
        self._promised: list[tuple[NodeId, Send]] = []
        """Promises to roles of this process, with their senders, that wait for a sync."""
        self._outbox = self._outbox_to(transport)
        self._held: list[AnswerAppends | Answer] = []
        """Answers that wait for a sync."""
        self._answers: list[AnswerAppends | Answer] = []
        """Answers that wait only for the end of the iteration."""
        self._deadlines: dict[NodeId, Instant] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = self._closed = False
        self._timer_due, self._written_bytes, self._written_at = 0.0, 0, 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        """The timer that checks whether the journal is idle."""
        self._sync: asyncio.Future[float] | None = None
        """The sync that runs in the thread; None: no sync runs there."""
        sharers = sum(isinstance(role, Shrinks) for role in self.roles.values())
        self._disk_space = DiskSpace(journal, config.node, self._wake_after, sharers=sharers)
        self.rewriting = Rewriting(journal, self.roles, config.node, self._wake_after, self.metrics)
        frames = config.node.journal.checkpoint_frames
        self._checkpointing = Checkpointing(
            journal, self._by_stream(), self._wake_after, frames=frames
        )
        self._sync_waiters: list[asyncio.Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal-sync")
        self._snapshots = SnapshotFiles(snapshots, self._wait_until_synced, self._on_snapshots)
        self._cold = ColdStore(journal.directory, config, self._wait_until_synced, self._on_cold)
        self._cells = CellStores(journal.directory, config, self._on_cells, self._on_cells_full)

    def _by_stream(self) -> dict[int, Role]:
        return {self._streams[node]: role for node, role in self.roles.items()}

    def _roles_that_wait(self) -> tuple[frozenset[NodeId], frozenset[NodeId]]:
        """Return two sets of roles. Answers and messages of the first set wait for a sync. Promises
        of the second set wait for the sync even if they go to a role of this process.
        """
        if set(self.view.nodes) <= self.roles.keys():
            return frozenset(self.roles), frozenset()
        persist = frozenset(n for n, role in self.roles.items() if isinstance(role, SurvivesLoss))
        return persist, persist

    def _outbox_to(self, transport: Transport | None) -> Outbox:
        """Return the outbox. A message that promises nothing may leave before a sync. It must wait
        if it could depend on unsynced data of another role of this process.
        """
        early = self._waiting == self._promising or len(self._waiting) < 2
        return Outbox(
            transport, self._epoch, self._config, self.metrics, waiting=self._waiting, early=early
        )

    # --- start and end

    def start(self, *, journal_lost: bool = False, term: TermBegun | None = None) -> None:
        """Recover the roles from the journal, and start them. If the journal is lost, report the
        loss to the roles instead.

        Args:
            journal_lost: whether the process had a journal at an earlier start, and now has none.
            term: the newest term; None: no term has begun.
        """
        frames = recover(self._journal, self._by_stream(), lost=journal_lost)
        self.metrics.damaged += self._journal.damaged
        self.metrics.corrected += self._journal.corrected
        if frames:
            log.info("journal recovered", frames=frames)
        if self._transport is not None:
            self._transport.start(self._on_frames)
        first = [Started(self._epoch)] if term is None else [Started(self._epoch), term]
        self._inbox = {node: [*first] for node in self.roles}
        self._checkpointing.start()
        self._disk_space.start()
        self._notify_of_disk_space()
        self._schedule()

    async def close(self) -> None:
        """Stop: sync all written frames, and answer all waiting callers."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._sync is not None:
            await asyncio.wait([self._sync])
        if self.failed is None:
            try:
                if self._journal.dirty:
                    await self._loop.run_in_executor(self._thread, self._journal.sync)
                self._release()
                self._checkpointing.stop(quiet=self._quiet)
            except OSError as error:
                self._fail(error)
        self._inbox.clear()
        self._abandon_callers()
        if self._transport is not None:
            self._transport.close()
        await self._snapshots.close()
        await self._cold.close()
        await self._cells.close()
        self._thread.shutdown()
        self.rewriting.close()
        self._journal.close()

    # --- entry points

    def wake(self, node: NodeId) -> None:
        """Call a role soon, because a direct call gave work to the role.

        Raises:
            NotReadyError: the shell has failed or is closed, so the role will not be called.
        """
        if node not in self._inbox:
            if self.ended:
                raise NotReadyError("The platform has stopped; open it again.")
            self._inbox[node] = []
        if not self._scheduled:
            self._schedule()

    def hasten(self, node: NodeId) -> None:
        """Call a role soon, and deliver all messages without delay, because a caller waits for an
        operation other than an append.

        Raises:
            NotReadyError: as `wake`.
        """
        self._hastened = True
        self.wake(node)

    def begin_term(self, term: TermBegun) -> None:
        """Notify all roles of a term. A term that is older than a role's newest one changes
        nothing.
        """
        if not self.ended:
            for node in self.roles:
                self._inbox.setdefault(node, []).append(term)
            self._schedule()

    def want_members(self, members: Members) -> None:
        """Notify all roles of the desired nodes of the cluster."""
        if not self.ended:
            for node in self.roles:
                self._inbox.setdefault(node, []).append(MembersWanted(members))
            self._schedule()

    @property
    def view(self) -> View:
        """The view at the start of this process."""
        return self._views[-1]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def holding(self) -> bool:
        """Whether a written frame is not synced yet."""
        return self._sync is not None or self._journal.dirty

    @property
    def ended(self) -> bool:
        """Whether the shell has failed or is closed. An ended shell calls no role."""
        return self._closed or self.failed is not None

    async def wait_until_synced(self) -> None:
        """Wait until all frames written so far are synced, or the shell has ended."""
        if self.holding and not self.ended:
            waiter = self._loop.create_future()
            self._sync_waiters.append(waiter)
            await waiter

    async def _wait_until_synced(self) -> bool:
        """Do the same as `wait_until_synced`; return whether the shell still runs."""
        await self.wait_until_synced()
        return not self.ended

    def _on_snapshots(self, node: NodeId, answer: SnapshotAnswer) -> None:
        if not self.ended:
            self._inbox.setdefault(node, []).append(SnapshotsAnswered(answer))
            self._schedule()

    def _on_cold(self, node: NodeId, answer: ColdAnswer) -> None:
        if not self.ended:
            self._inbox.setdefault(node, []).append(ColdAnswered(answer))
            self._schedule()

    def _on_cells(self, node: NodeId, to: NodeId, answer: CellAnswer) -> None:
        if not self.ended:
            self._inbox.setdefault(node, []).append(CellsAnswered(to, answer))
            self._schedule()

    def _on_cells_full(self, is_full: bool) -> None:  # noqa: FBT001 - a callback with one argument
        self._disk_space.others_full = is_full
        if not self.ended:
            self._schedule()

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        if self.ended:
            return
        for frame in frames:
            envelope = self._fence.admit(frame)
            if isinstance(envelope, RefusedFrame):
                what = str(envelope.detail)[:200]
                count_ignored(self.metrics, envelope.reason, what=what)
                if envelope.reason == MALFORMED:
                    log.warning("a frame of another node cannot be read", reason=what)
                continue
            for message in envelope.messages:
                self.metrics.received[type(message).__name__] += 1
            inbox = self._inbox.setdefault(envelope.receiver, [])
            sender = envelope.sender
            epoch = envelope.epoch
            inbox += [Received(sender, message, epoch) for message in envelope.messages]
        self._schedule()

    def _on_unknown_message(self, sender: NodeId, kind: str) -> None:
        """Ignore a message of a kind that only a later release knows."""
        count_ignored(self.metrics, "message of an unknown kind", sender=sender, what=kind[:200])

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._iterate)

    # --- one iteration of the loop

    def _iterate(self) -> None:
        self._scheduled = False
        if self.ended:
            return
        try:
            self._drain()
            if self._checkpointing.due:
                self._checkpointing.advance(quiet=self._quiet)
            self._finish()
            self._watch_idle()
            if self._disk_space.short:
                self._notify_of_disk_space()
        except Exception as error:  # noqa: BLE001 the outermost loop: our bug, or the disk
            self._fail(error)
            return
        if self._inbox or (self._later and not self._held):
            # Callers that were just answered run before the next iteration. So the next iteration
            # includes their next operations, and the answers that they forward are written first.
            self._scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._iterate)
        elif self._later_since is not None:
            self._wake_after(self._later_since + _LATER_S - self.clock.now())
        if self._deadlines:
            self._wake_after(max(0.001, min(self._deadlines.values()) - self.clock.now()))

    @property
    def _quiet(self) -> bool:
        """Whether all frames that roles asked to persist are written, and the roles have been
        notified.
        """
        waiting = (event for events in self._inbox.values() for event in events)
        return not self._disk_space.waiting and not any(
            isinstance(event, Persisted) for event in waiting
        )

    def _drain(self) -> None:
        """Call roles until none has events left."""
        now = self.clock.now()
        self._put_due(now)
        inbox, roles, epoch = self._inbox, self.roles, self._epoch
        promising, waiting = self._promising, self._waiting
        touched: dict[NodeId, None] = {}  # ordered, so that a run can be repeated exactly
        for _ in range(_ROUNDS_MAX):
            if not inbox and not self._take_later(now):
                break
            node = next(iter(inbox))
            touched[node] = None
            held = self._held if node in waiting else self._answers
            for effect in roles[node].handle(inbox.pop(node), now):
                # The commonest effects are performed here, which saves a call of `_perform`.
                if type(effect) is AnswerAppends:
                    held.append(effect)
                elif type(effect) is Send and (to := effect.to) in roles:
                    if node in promising and effect.message.promises:
                        self._promised.append((node, effect))
                        continue
                    box = inbox if effect.urgent else self._later
                    if to in box:
                        box[to].append(Received(node, effect.message, epoch))
                    else:
                        box[to] = [Received(node, effect.message, epoch)]
                elif type(effect) is Persist:
                    self._persist(node, effect)
                else:
                    self._perform(node, effect)
        self._note_deadlines(touched)

    def _put_due(self, now: Instant) -> None:
        """Give an empty batch of events to each role whose deadline has passed."""
        for node, persisted in self._disk_space.retry(now):
            self._inbox.setdefault(node, []).append(persisted)
        for node, overdue in self._deadlines.items():
            if overdue <= now:
                self._inbox.setdefault(node, [])

    def _notify_of_disk_space(self) -> None:
        """Notify the roles that persist when the disk becomes full, and when it has room again."""
        if (change := self._disk_space.pop_change(self.clock.now())) is not None:
            for node, role in self.roles.items():
                if isinstance(role, SurvivesLoss):
                    self._inbox.setdefault(node, []).append(change)

    def _take_later(self, now: Instant) -> bool:
        """Begin to deliver the messages that are not urgent. False: there are none, or they wait
        until callers are answered.

        So a lone append is answered before index roles handle it, and many appends reach index
        roles together. The effects of the messages are performed in the same iteration.
        """
        if not self._later:
            self._hastened = False
            return False
        self._later_since = self._later_since or now
        waits = self._held and not self._hastened
        if waits and now < self._later_since + _LATER_S:
            return False
        self._later_since, self._hastened = None, True
        for node, events in self._later.items():
            self._inbox.setdefault(node, []).extend(events)
        self._later.clear()
        return True

    def _note_deadlines(self, touched: Iterable[NodeId]) -> None:
        for node in touched:
            if (due := self.roles[node].deadline()) is None:
                self._deadlines.pop(node, None)
            else:
                self._deadlines[node] = due

    def _perform(self, node: NodeId, effect: Effect) -> None:  # noqa: C901 a case per effect
        match effect:
            case Send(to, message):
                assert to not in self.roles, "messages within the process are passed by reference"
                self._outbox.put(node, to, message)
            case AnswerAppends() | Answer():
                (self._held if node in self._waiting else self._answers).append(effect)
            case Persist():
                self._persist(node, effect)
            case ReadFrame(location, token):
                payload_read = self._journal.read(location)
                self._inbox.setdefault(node, []).append(FrameRead(token, payload_read))
            case AskSnapshots(request):
                self._snapshots.ask(node, request)
            case AskCold(cold_request):
                self._cold.ask(node, cold_request)
            case AskCells(sender, question):
                self._cells.ask(node, sender, question)
            case Discard():
                self._journal.discard(effect.location, elsewhere=effect.elsewhere)
            case ReclaimableBytes(by_segment, began):
                self._journal.old.set_reclaimable(node, by_segment, began=began)
            case Ignore():
                count_effect(self.metrics, node, effect)
            case unreachable:
                assert_never(unreachable)

    def _persist(self, node: NodeId, effect: Persist) -> None:
        location = self._disk_space.write(node, self._streams[node], effect)
        if effect.kind is FrameKind.REPAIRED:
            self.metrics.repaired += 1
        if location is not None:
            box = self._inbox.get(node)
            if box is None:
                box = self._inbox[node] = []
            box.append(Persisted(effect.token, location))

    def _finish(self) -> None:
        """Send the messages that may leave before the sync. Sync the frames that this iteration
        wrote. Then send the other messages.
        """
        if self._answers:
            answers, self._answers = self._answers, []
            self._release_answers(answers)
        if self._sync is None:  # a running sync holds a lock, which would block the loop
            self._journal.free_discarded()
        self._outbox.send_early()
        if self.rewriting.busy:
            self.rewriting.advance(self.clock.now())
        if self._sync is not None:
            return
        if not self._journal.dirty:
            self._release()
        elif self.sync_average_s < self._config.node.journal.sync_inline_s_max:
            self._journal.flush()
            self._synced_in(_seconds_of(self._journal.sync_flushed))
            self._release()
        else:
            self._sync_in_thread(self._journal.sync_flushed)

    def _sync_in_thread(self, sync: Callable[[], None]) -> None:
        self._journal.flush()
        held, self._held = self._held, []
        promised, self._promised = self._promised, []
        outgoing = self._outbox.take()
        covered, self._sync_waiters = self._sync_waiters, []

        def done(future: asyncio.Future[float]) -> None:
            self._sync = None
            if (error := future.exception()) is not None:
                self._held = held + self._held
                self._sync_waiters = covered + self._sync_waiters
                self._fail(error)
                return
            if sync == self._journal.sync_flushed:
                self._synced_in(future.result())
            self._release_answers(held)
            self._outbox.send(outgoing)
            resolve_all(covered)
            self._deliver(promised)
            if (
                self._inbox
                or self._held
                or self._outbox
                or self._promised
                or self._journal.dirty
                or self._sync_waiters
            ):
                self._schedule()

        # The sync is timed in the thread, so that waiting for the thread does not count.
        self._sync = self._loop.run_in_executor(self._thread, _seconds_of, sync)
        self._sync.add_done_callback(done)

    def _watch_idle(self) -> None:
        """Start a timer that records the synced end of the journal when nothing has been written
        for `journal_idle_s`.
        """
        if self._journal.written_bytes != self._written_bytes:
            self._written_bytes = self._journal.written_bytes
            self._written_at = self._loop.time()
            if self._idle_timer is None:
                self._idle_timer = self._loop.call_later(self._idle_s(), self._on_idle)

    def _idle_s(self) -> float:
        return self._config.node.journal.journal_idle_s

    def _on_idle(self) -> None:
        self._idle_timer = None
        if self.ended:
            return
        rest_s = self._written_at + self._idle_s() - self._loop.time()
        if self._sync is not None or rest_s > 0:
            self._idle_timer = self._loop.call_later(max(rest_s, _LATER_S), self._on_idle)
            return
        try:
            self._sync_in_thread(self._journal.record_synced_end)
        except OSError as error:
            self._fail(error)

    def _synced_in(self, seconds: float) -> None:
        self.metrics.syncs.observe(seconds)
        counted = min(seconds, 2 * self._config.node.journal.sync_inline_s_max)
        self.sync_average_s += (counted - self.sync_average_s) * _AVERAGE_WEIGHT

    def _release(self) -> None:
        self._journal.flush_promised()
        waiters, self._sync_waiters = self._sync_waiters, []
        resolve_all(waiters)
        if self._held:
            held, self._held = self._held, []
            self._release_answers(held)
        self._outbox.send(self._outbox.take())
        if self._promised:
            promised, self._promised = self._promised, []
            self._deliver(promised)

    def _deliver(self, promised: Iterable[tuple[NodeId, Send]]) -> None:
        """Give roles of this process the messages that waited for a sync."""
        for sender, sent in promised:
            box = self._inbox if sent.urgent else self._later
            received = Received(sender, sent.message, self._epoch)
            box.setdefault(sent.to, []).append(received)

    def _release_answers(self, held: list[AnswerAppends | Answer]) -> None:
        """Resolve futures, except those that their callers have cancelled."""
        for effect in held:
            if isinstance(effect, AnswerAppends):
                self.metrics.appended += len(effect.waiters)
                resolve_ordered(effect)
            else:
                resolve(effect.waiter, effect.outcome)

    # --- time and failure

    def _wake_after(self, seconds: float) -> None:
        """Run the next iteration within `seconds`.

        There is one timer, for the earliest requested time. Later times are not stored, because
        each iteration requests the times that it still needs.
        """
        due = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._schedule()

    def _fail(self, error: BaseException) -> None:
        """End permanently. Output that depends on unsynced frames is not sent."""
        if first := self.failed is None:
            self.failed = error
            # An error of the platform needs no traceback: its message suffices.
            info = None if isinstance(error, IndilogError) else error
            log.error("node failed", error=str(error), exc_info=info)
        # `_fail` is called a second time if a sync in the thread fails after the first error.
        # Further callers may wait then.
        self._abandon(str(error))
        if first:
            self._on_fatal(error)

    def _abandon(self, reason: str) -> None:
        self._abandon_held(reason)
        self._outbox.clear()
        self._promised.clear()
        self._inbox.clear()
        self._later.clear()
        waiters, self._sync_waiters = self._sync_waiters, []
        resolve_all(waiters)
        self._abandon_callers()

    def _abandon_held(self, reason: str) -> None:
        """Answer the callers whose outcomes will not be sent. Only the next recovery shows whether
        their records are on disk.
        """
        stopped = NotReadyError(f"The platform stopped: {reason}")
        unknown = AppendOutcomeUnknownError(
            f"The platform stopped; the record may or may not be in the log: {reason}"
        )
        for effect in (*self._answers, *self._held):
            if isinstance(effect, AnswerAppends):
                resolve_each(effect.waiters, unknown)
            else:  # an unknown outcome must not be reported as "nothing was done"
                failed = isinstance(effect.outcome, BaseException)
                resolve(effect.waiter, effect.outcome if failed else stopped)
        self._answers.clear()
        self._held.clear()

    def _abandon_callers(self) -> None:
        """Answer all callers that still wait for a role of this process."""
        for role in self.roles.values():
            if isinstance(role, ServesCallers):
                for effect in role.abandon():
                    assert isinstance(effect, Answer), "a role that ends only answers"
                    resolve(effect.waiter, effect.outcome)


def _seconds_of(call: Callable[[], None]) -> float:
    """Call `call`, and return how many seconds it took."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
