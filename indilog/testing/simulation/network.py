"""The network between processes: frames are late, lost, repeated, out of order, or cut off.

It keeps one guarantee of a transport (`indilog.runtime.transport.transport`): it never changes a
frame. Frames to one process keep their order, unless `reorder` is set. A frame that arrives while
its receiver is down is lost; a frame that arrives after a restart is delivered. A process sends
frames through a `SimulatedTransport`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Protocol

from indilog.base.ids import NodeId
from indilog.runtime.transport.transport import OnFrames, TransportCounts
from indilog.testing.simulation.world import World


class Receiver(Protocol):
    """The part of a process that the network uses."""

    @property
    def name(self) -> str:
        """The name that `cut` and `slow` use."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes whose frames it receives."""

    def receive(self, sender: str, frame: bytes) -> None:
        """Deliver a frame, or lose it if the process is down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkQuality:
    """The loss, delay, repetition and order of frames."""

    delay_s_min: float = 0.00005
    delay_s_max: float = 0.0003
    late: float = 0.0
    """The share of frames that take up to `late_s_max` longer."""
    late_s_max: float = 0.05
    loss: float = 0.0
    """The share of frames that never arrive."""
    repeat: float = 0.0
    """The share of frames that arrive twice."""
    reorder: bool = False


PERFECT = LinkQuality()


class SimulatedNetwork:
    """All links. `quality` is that of every link; `slow` processes receive all frames late."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.chance("network")
        self.quality = PERFECT
        self.slow: dict[str, float] = {}
        """The maximal delay of frames to these processes, in seconds."""
        self._cut: set[tuple[str, str]] = set()
        self._homes: dict[NodeId, list[Receiver]] = {}
        self._last_s: dict[tuple[str, str], float] = {}
        self.frames_lost = 0
        self.frames_repeated = 0

    def settle(self, process: Receiver) -> None:
        """Deliver frames for the nodes of `process` to it; another process may get them, too."""
        for node in process.nodes:
            homes = self._homes.setdefault(node, [])
            if process not in homes:
                homes.append(process)

    def forget(self, process: Receiver) -> None:
        """Deliver no more frames to `process`."""
        for node in process.nodes:
            self._homes[node].remove(process)

    def cut(self, senders: Collection[str], receivers: Collection[str]) -> None:
        """Lose every frame from one of `senders` to one of `receivers` (one way)."""
        self._cut |= {(s, r) for s in senders for r in receivers if s != r}

    def join(self) -> None:
        """End all cuts."""
        self._cut.clear()

    def heal(self) -> None:
        """End all cuts, delays and losses."""
        self.join()
        self.slow.clear()
        self.quality = PERFECT

    def carry(self, sender: str, receiver: NodeId, frame: bytes) -> None:
        """Schedule the arrival of one frame, or lose it."""
        for process in self._homes.get(receiver, ()):
            if (sender, process.name) in self._cut or self._chance.random() < self.quality.loss:
                self.frames_lost += 1
                continue
            copies = 1
            if self.quality.repeat and self._chance.random() < self.quality.repeat:
                copies = 2
                self.frames_repeated += 1
            for _ in range(copies):
                self._world.at(
                    self._arrival_s(sender, process.name), process.receive, sender, frame
                )

    def _arrival_s(self, sender: str, receiver: str) -> float:
        chance, quality = self._chance, self.quality
        delay_s = chance.uniform(quality.delay_s_min, quality.delay_s_max)
        if quality.late and chance.random() < quality.late:
            delay_s += chance.uniform(0.0, quality.late_s_max)
        if receiver in self.slow:
            delay_s += chance.uniform(0.0, self.slow[receiver])
        arrival_s = self._world.now_s + delay_s
        if not quality.reorder:
            link = (sender, receiver)
            arrival_s = self._last_s[link] = max(arrival_s, self._last_s.get(link, 0.0))
        return arrival_s


class SimulatedTransport:
    """The `Transport` of one process."""

    def __init__(self, network: SimulatedNetwork, sender: str) -> None:
        self.counts = TransportCounts()
        self._network = network
        self._sender = sender
        self._waiting: list[tuple[NodeId, bytes]] = []
        self.on_frames: OnFrames | None = None

    def start(self, on_frames: OnFrames) -> None:
        """Deliver frames from now on."""
        self.on_frames = on_frames

    def send(self, receiver: NodeId, frame: bytes) -> None:
        """Send a frame with the next `flush`."""
        self._waiting.append((receiver, frame))
        self.counts.frames_sent += 1
        self.counts.bytes_sent += len(frame)

    def flush(self) -> None:
        """Send the waiting frames."""
        waiting, self._waiting = self._waiting, []
        for receiver, frame in waiting:
            self._network.carry(self._sender, receiver, frame)

    def close(self) -> None:
        """Stop at once."""
        self.on_frames = None
        self._waiting.clear()
