"""`NodeShell`: nothing leaves the process before the sync; faults end it; deadlines are kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import structlog.testing

from indilog.config import Config, NodeConfig
from indilog.envelope import Envelope, envelope_decoded, envelope_encoded
from indilog.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.ids import Epoch, Instant, NodeId, ViewNumber
from indilog.messages import MetalogWanted
from indilog.roles import (
    Answer,
    Appended,
    Effect,
    Event,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.runtime.node import NodeShell
from indilog.runtime.old_segments import OldSegments
from indilog.runtime.transport import TransportCounts
from indilog.sequencer_messages import MetalogAppend
from indilog.view import view_of

A, B, AWAY = NodeId("sequencer-0"), NodeId("storage-0"), NodeId("engine-0")
BACKUP = NodeId("sequencer-1")
PROMISES_NOTHING = MetalogAppend(Epoch(1), 0, Epoch(0), (), 0)


class Story:
    """What happened outside the roles, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []


class StoryJournal:
    """A journal that tells what was asked of it; a sync can be made to wait or to fail."""

    starved = failed = False
    damaged = mended = 0
    room = 1 << 30

    def __init__(self, story: Story) -> None:
        self._story = story
        self.dirty = False
        self.old = OldSegments()
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None

    def recover(self) -> Iterator[tuple[int, FrameKind, bytes, Location]]:
        return iter(())

    def write(self, stream: int, kind: FrameKind, payload: bytes) -> Location:
        self.dirty = True
        self._story.events.append(f"write {payload!r}")
        return Location(1, 0, len(payload))

    def read(self, location: Location) -> bytes | None:
        return None

    def flush(self) -> None:
        self.dirty = False

    def sync(self) -> None:
        self.flush()
        self.sync_flushed()

    def give_back(self) -> None:
        pass

    def sync_flushed(self) -> None:
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self._story.events.append("sync")

    def close(self) -> None:
        pass


class StoryTransport:
    """A transport that tells what was sent."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.on_frames: Callable[[list[bytes]], None] = lambda _: None
        self.counts = TransportCounts()

    def start(self, on_frames: Callable[[list[bytes]], None]) -> None:
        self.on_frames = on_frames

    def send(self, receiver: NodeId, frame: bytes) -> None:
        envelope = envelope_decoded(frame)
        self._story.events.append(f"send {len(envelope.messages)} to {receiver}")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Scripted:
    """A role that answers events with what the test says."""

    def __init__(self, script: Callable[[Event], list[Effect]]) -> None:
        self._script = script
        self.heard: list[Event] = []
        self.calls = 0
        self.due: Instant | None = None

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        raise AssertionError("nothing to recover")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        self.calls += 1
        if self.due is not None and now >= self.due:
            self.due = None
        self.heard += events
        return [effect for event in events for effect in self._script(event)]

    def deadline(self) -> Instant | None:
        return self.due

    def check_invariants(self) -> None:
        pass


class House:
    """A shell over scripted roles, and what is needed to look at it."""

    def __init__(self, roles: dict[NodeId, Scripted], **settings: float) -> None:
        self.story = Story()
        self.journal = StoryJournal(self.story)
        self.transport = StoryTransport(self.story)
        self.fatal: list[BaseException] = []
        self.shell = NodeShell(
            roles,
            [view_of()],
            Config(node=NodeConfig(**settings)),  # type: ignore[arg-type]
            journal=self.journal,  # type: ignore[arg-type]
            transport=self.transport,
            epoch=Epoch(1),
            on_fatal=self.fatal.append,
        )
        self.shell.start()


def waiter(story: Story, name: str) -> asyncio.Future[object]:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: story.events.append(f"told {name}"))
    return future


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_answers_and_messages_leave_after_the_sync_of_what_was_written_before() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1)]
            case Persisted():
                return [
                    Appended([told], 5, 1),
                    Send(AWAY, MetalogWanted(0)),
                    Send(AWAY, MetalogWanted(1)),
                ]
            case _:
                return []

    role = Scripted(script)
    house = House({A: role})
    told = waiter(house.story, "caller")
    assert await asyncio.wait_for(told, 5) == (5, 1)
    await turns()
    assert house.story.events[:2] == ["write b'entry'", "sync"]
    assert sorted(house.story.events[2:]) == ["send 2 to engine-0", "told caller"]
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_message_that_promises_nothing_leaves_before_the_sync() -> None:
    script: list[Effect] = [
        Persist(FrameKind.METALOG, b"entry", 1),
        Send(AWAY, MetalogWanted(0)),
        Send(BACKUP, PROMISES_NOTHING),
    ]
    house = House({A: Scripted(lambda event: script if isinstance(event, Started) else [])})
    await turns()
    assert house.story.events == [
        "write b'entry'",
        "send 1 to sequencer-1",
        "sync",
        "send 1 to engine-0",
    ]
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_message_that_promises_nothing_leaves_beside_a_slow_sync() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1), Send(BACKUP, PROMISES_NOTHING)]
            case Received():
                return [Send(BACKUP, PROMISES_NOTHING), Send(AWAY, MetalogWanted(0))]
            case _:
                return []

    house = House({A: Scripted(script)}, sync_inline_s_max=0.0)
    house.shell.sync_average_s = 1.0
    house.journal.gate.clear()
    await turns()
    frame = envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, A, (MetalogWanted(0),)))
    house.transport.on_frames([frame])
    await turns()
    early = ["write b'entry'", "send 1 to sequencer-1", "send 1 to sequencer-1"]
    assert (house.shell.holding, house.story.events) == (True, early)
    house.journal.gate.set()
    await asyncio.wait_for(house.shell.settled(), 5)
    await turns()
    assert house.story.events == [*early, "sync", "send 1 to engine-0"]
    await house.shell.close()


@pytest.mark.asyncio
async def test_messages_between_roles_of_the_process_arrive_in_the_same_turn_by_reference() -> None:
    message = MetalogWanted(7)
    sender = Scripted(lambda event: [Send(B, message)] if isinstance(event, Started) else [])
    receiver = Scripted(lambda _: [])
    house = House({A: sender, B: receiver})
    await turns()
    (heard,) = [e for e in receiver.heard if isinstance(e, Received)]
    assert heard.message is message
    assert house.story.events == []
    await house.shell.close()


@pytest.mark.asyncio
async def test_while_a_slow_sync_runs_the_loop_goes_on_and_holds_what_it_produces() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1)]
            case Persisted():
                return [Answer(first, None)]
            case Received():
                return [Answer(second, None)]
            case _:
                return []

    house = House({A: Scripted(script)}, sync_inline_s_max=0.0)
    house.shell.sync_average_s = 1.0
    house.journal.gate.clear()
    first, second = waiter(house.story, "first"), waiter(house.story, "second")
    await turns()
    frame = envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, A, (MetalogWanted(0),)))
    house.transport.on_frames([frame])
    await turns()
    assert house.shell.holding
    assert not first.done()
    assert not second.done()
    house.journal.gate.set()
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    assert house.story.events == ["write b'entry'", "sync", "told first", "told second"]
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_failed_sync_ends_the_shell_and_nothing_leaves() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1)]
            case Persisted():
                return [
                    Appended([None, appended], 5, 1), Answer(read, 7), Send(AWAY, MetalogWanted(0))
                ]  # fmt: skip
            case _:
                return []

    house = House({A: Scripted(script)})
    house.journal.error = OSError(5, "EIO")
    appended, read = (asyncio.get_running_loop().create_future() for _ in range(2))
    # The entry may be on the disk, and then recovery finds it: to repeat may be to append twice.
    with pytest.raises(AppendOutcomeUnknownError, match="EIO"):
        await asyncio.wait_for(appended, 5)
    with pytest.raises(NotReadyError, match="EIO"):
        await asyncio.wait_for(read, 5)
    assert house.fatal == [house.journal.error]
    assert house.story.events == ["write b'entry'"]
    await house.shell.close()


@pytest.mark.asyncio
async def test_an_unknown_outcome_stays_unknown_when_the_sync_fails() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1)]
            case Persisted():
                return [Answer(told, AppendOutcomeUnknownError("another writer has the shard"))]
            case _:
                return []

    house = House({A: Scripted(script)})
    house.journal.error = OSError(5, "EIO")
    told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    with pytest.raises(AppendOutcomeUnknownError, match="another writer"):
        await asyncio.wait_for(told, 5)
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_role_that_breaks_an_invariant_ends_the_shell() -> None:
    def script(event: Event) -> list[Effect]:
        raise AssertionError("cuts only grow")

    house = House({A: Scripted(script)})
    await turns()
    assert [str(error) for error in house.fatal] == ["cuts only grow"]
    assert isinstance(house.shell.failed, AssertionError)
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_role_is_called_at_its_deadline_without_events() -> None:
    role = Scripted(lambda _: [])
    house = House({A: role})
    role.due = Instant(house.shell.clock.now() + 0.01)
    called = asyncio.Event()
    original = role.handle

    def handle(events: Sequence[Event], now: Instant) -> list[Effect]:
        if not events:
            called.set()
        return original(events, now)

    role.handle = handle  # type: ignore[method-assign]
    await asyncio.wait_for(called.wait(), 5)
    await house.shell.close()


@pytest.mark.asyncio
async def test_frames_that_are_not_for_us_are_counted_and_dropped() -> None:
    role = Scripted(lambda _: [])
    house = House({A: role})
    await turns()
    message = (MetalogWanted(0),)
    house.transport.on_frames([
        b"junk",
        envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, B, message)),
        envelope_encoded(Envelope(1, ViewNumber(9), Epoch(1), AWAY, A, message)),
        envelope_encoded(Envelope(1, ViewNumber(1), Epoch(2), AWAY, A, message)),
        envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, A, message)),
    ])  # fmt: skip
    await turns()
    assert [e for e in role.heard if isinstance(e, Received)] == [Received(AWAY, message[0])]
    assert sum(house.shell.metrics.ignored.values()) == 4
    assert house.shell.metrics.ignored["frame of an old incarnation"] == 1
    assert house.shell.metrics.received == {"MetalogWanted": 1}
    await house.shell.close()


@pytest.mark.asyncio
async def test_closing_syncs_what_is_written() -> None:
    role = Scripted(
        lambda event: [Persist(FrameKind.METALOG, b"e", 1)] if isinstance(event, Started) else []
    )
    house = House({A: role})
    await turns()
    await house.shell.close()
    assert house.story.events == ["write b'e'", "sync"]


def _persist_and_answer(told: dict[str, asyncio.Future[object]]) -> Scripted:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"first", 1)]
            case Persisted(token, _):
                return [Answer(told["first" if token == 1 else "second"], None)]
            case Received():
                return [Persist(FrameKind.METALOG, b"second", 2)]
            case _:
                return []

    return Scripted(script)


def _nudge(house: House) -> None:
    message = (MetalogWanted(0),)
    house.transport.on_frames(
        [envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, A, message))]
    )


@pytest.mark.asyncio
async def test_who_settles_during_a_sync_waits_for_what_was_written_meanwhile() -> None:
    told: dict[str, asyncio.Future[object]] = {}
    house = House({A: _persist_and_answer(told)}, sync_inline_s_max=0.0)
    house.shell.sync_average_s = 1.0
    told |= {name: waiter(house.story, name) for name in ("first", "second")}
    house.journal.gate.clear()
    await turns()
    _nudge(house)
    await turns()
    settled = asyncio.ensure_future(house.shell.settled())
    settled.add_done_callback(lambda _: house.story.events.append("settled"))
    house.journal.gate.set()
    await asyncio.wait_for(settled, 5)
    await turns()
    events = house.story.events
    assert events.index("settled") > events.index("write b'second'")
    assert events[: events.index("settled")].count("sync") == 2
    await house.shell.close()


@pytest.mark.asyncio
async def test_a_failed_sync_in_the_thread_tells_everyone_and_lets_the_shell_close() -> None:
    told: dict[str, asyncio.Future[object]] = {}
    house = House({A: _persist_and_answer(told)}, sync_inline_s_max=0.0)
    house.shell.sync_average_s = 1.0
    told |= {name: waiter(house.story, name) for name in ("first", "second")}
    house.journal.gate.clear()
    house.journal.error = OSError(5, "EIO")
    await turns()
    settled = asyncio.ensure_future(house.shell.settled())
    house.journal.gate.set()
    with pytest.raises(NotReadyError, match="EIO"):
        await asyncio.wait_for(told["first"], 5)
    await asyncio.wait_for(settled, 5)
    await asyncio.wait_for(house.shell.close(), 5)
    assert len(house.fatal) == 1
    with pytest.raises(NotReadyError, match="stopped"):
        house.shell.wake(A)


@pytest.mark.asyncio
async def test_a_sync_that_fails_after_the_shell_has_failed_tells_its_callers() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Persist(FrameKind.METALOG, b"entry", 1)]
            case Persisted():
                return [Appended([told], 5, 1)]
            case _:
                raise AssertionError("cuts only grow")

    house = House({A: Scripted(script)}, sync_inline_s_max=0.0)
    house.shell.sync_average_s = 1.0
    told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    house.journal.gate.clear()
    house.journal.error = OSError(5, "EIO")
    await turns()
    _nudge(house)
    await turns()
    assert isinstance(house.shell.failed, AssertionError)
    house.journal.gate.set()
    with pytest.raises(AppendOutcomeUnknownError, match="EIO"):
        await asyncio.wait_for(told, 5)
    assert len(house.fatal) == 1
    await house.shell.close()


@pytest.mark.asyncio
async def test_what_a_role_says_of_the_disk_is_counted_as_damage_and_logged() -> None:
    def script(event: Event) -> list[Effect]:
        match event:
            case Started():
                return [Ignore(Location(1, 32, 5), "a record batch on disk is damaged")]
            case _:
                return []

    with structlog.testing.capture_logs() as logs:
        house = House({A: Scripted(script)})
        await turns()
    assert house.shell.metrics.damaged == 1
    assert [(e["log_level"], e["segment"]) for e in logs if "damaged" in e["event"]] == [
        ("error", 1)
    ]
    await house.shell.close()
