"""A `NodeShell` over scripted roles, with a journal and a transport that record their calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config, node_config
from indilog.kernel.view import view_of
from indilog.roles.role import Effect, Event, FrameKind, Location, Lost, Persist
from indilog.runtime.journal.old_segments import OldSegments
from indilog.runtime.journal.open_segments import OpenSegments
from indilog.runtime.node import NodeShell
from indilog.runtime.transport.transport import TransportCounts
from indilog.wire.envelope import WIRE_VERSION, Envelope, decode_envelope, encode_envelope
from indilog.wire.messages import MetalogWanted

A, B, AWAY = NodeId("sequencer-0"), NodeId("storage-0"), NodeId("engine-0")
PERSIST = Persist(FrameKind.METALOG, b"entry", 1)

Script: TypeAlias = Mapping[type[Event], Callable[[Any], list[Effect]]]
"""A role's reaction to an event, by the event's type; it ignores events of other types."""


class StoryJournal:
    """A journal that records its calls; a sync can be made to wait or to fail."""

    starved = failed = False
    damaged = corrected = 0
    room = 1 << 30
    written_bytes = 0
    frames = 0

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.directory = Path()
        self.dirty = False
        self.syncs = True
        """Whether a written frame must be synced: not with durability `memory`."""
        self.old = OldSegments()
        self.files = OpenSegments(Path())
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self._loop = asyncio.get_running_loop()
        self.settled = asyncio.Event()

    def load_checkpoint(self) -> None:
        return None

    def recover(self) -> Iterator[tuple[int, FrameKind, bytes, Location]]:
        return iter(())

    def write(self, stream: int, kind: FrameKind, payload: bytes) -> Location:
        self.dirty = self.syncs
        self.written_bytes += len(payload)
        self._story.append(f"write {payload!r}")
        return Location(1, 0, len(payload))

    def read(self, location: Location) -> bytes | None:
        return None

    def flush(self) -> None:
        self.dirty = False

    def sync(self) -> None:
        self.flush()
        self.sync_flushed()

    def flush_promised(self) -> None:
        if not self.syncs:
            self._story.append("flush")

    def free_discarded(self) -> None:
        pass

    def sync_flushed(self) -> None:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self._story.append("sync")

    def record_synced_end(self) -> None:
        self._story.append("settle")
        self._loop.call_soon_threadsafe(self.settled.set)

    def close(self) -> None:
        pass


class StoryTransport:
    """A transport that records the frames it was given."""

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.on_frames: Callable[[list[bytes]], None] = lambda _: None
        self.counts = TransportCounts()

    def start(self, on_frames: Callable[[list[bytes]], None]) -> None:
        self.on_frames = on_frames

    def send(self, receiver: NodeId, frame: bytes) -> None:
        envelope = decode_envelope(frame)
        self._story.append(f"send {len(envelope.messages)} to {receiver}")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class PassiveRole:
    """A role that follows its script and persists nothing."""

    def __init__(self, script: Script | None = None) -> None:
        self._script = script or {}
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
        scripted = [(self._script[type(e)], e) for e in events if type(e) in self._script]
        return [effect for act, event in scripted for effect in act(event)]

    def deadline(self) -> Instant | None:
        return self.due

    def check_invariants(self) -> None:
        pass


class Scripted(PassiveRole):
    """A role that follows its script; it may persist."""

    def lost(self, frame: Lost, /) -> None:
        raise AssertionError("nothing to lose")

    def recovered(self) -> None:
        pass


class RoleHost:
    """A shell over scripted roles, with its recorded story.

    Attributes:
        story: what happened outside the roles, in order.
    """

    def __init__(self, roles: Mapping[NodeId, PassiveRole], **settings: float) -> None:
        self.story: list[str] = []
        self.journal = StoryJournal(self.story)
        self.transport = StoryTransport(self.story)
        self.fatal: list[BaseException] = []
        self.shell = NodeShell(
            roles,
            [view_of()],
            Config(node=node_config(**settings)),
            journal=self.journal,  # type: ignore[arg-type]
            transport=self.transport,
            epoch=Epoch(1),
            on_fatal=self.fatal.append,
        )
        self.shell.start()

    def waiter(self, name: str) -> asyncio.Future[object]:
        """Return a caller's future; its completion is recorded in the story."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self.story.append(f"answered {name}"))
        return future

    def nudge(self) -> None:
        """Let A receive a message."""
        self.transport.on_frames([frame_to(A)])


def with_held_sync(script: Script) -> RoleHost:
    """Return a host whose syncs run in a thread, as slow ones do, and wait for `journal.gate`."""
    host = RoleHost({A: Scripted(script)}, sync_inline_s_max=0.0)
    host.journal.gate.clear()
    return host


def frame_to(receiver: NodeId, *, epoch: int = 1) -> bytes:
    """Return a message to a role of this process, of an incarnation of its sender."""
    names = (Epoch(epoch), AWAY, receiver)
    return encode_envelope(Envelope(WIRE_VERSION, *names, (MetalogWanted(0),)))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
