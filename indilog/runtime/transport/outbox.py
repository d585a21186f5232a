"""Messages of the roles of a process to other processes, until they may leave (ARCHITECTURE 5).

Messages wait for the sync of what was written before them; those that promise nothing
(`Message.promises`) do not. All messages of a turn from one node to another travel in one
`Envelope`, or in a few when they are many or large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from indilog.base.ids import Epoch, NodeId
from indilog.base.telemetry import Metrics
from indilog.config import Config
from indilog.kernel.view import Views
from indilog.runtime.transport.transport import Transport
from indilog.wire.envelope import envelope_packed, message_encoded
from indilog.wire.messages import Message

_MESSAGES_PER_ENVELOPE_MAX: Final = 64

Letters: TypeAlias = Mapping[tuple[NodeId, NodeId], Sequence[Message]]
"""Messages by sender and receiver."""


class Outbox:
    """Collects messages; sends them when its owner says that they may leave."""

    def __init__(
        self,
        transport: Transport | None,
        views: Views,
        epoch: Epoch,
        config: Config,
        metrics: Metrics,
    ) -> None:
        self._transport = transport
        self._views = views
        self._epoch = epoch
        self._frame_bytes_max = config.cluster.message_bytes_max
        self._metrics = metrics
        self._waiting: dict[tuple[NodeId, NodeId], list[Message]] = {}
        self._early: dict[tuple[NodeId, NodeId], list[Message]] = {}
        """Messages that promise nothing; empty between turns."""

    def __bool__(self) -> bool:
        """Whether something waits for a sync."""
        return bool(self._waiting)

    def put(self, sender: NodeId, receiver: NodeId, message: Message) -> None:
        """Keep a message until it may leave."""
        box = self._waiting if message.promises else self._early
        box.setdefault((sender, receiver), []).append(message)

    def send_early(self) -> None:
        """Send what promises nothing."""
        if self._early:
            early, self._early = self._early, {}
            self.send(early)

    def take(self) -> Letters:
        """Return what waits for a sync; it is not kept any longer."""
        taken, self._waiting = self._waiting, {}
        return taken

    def send(self, letters: Letters) -> None:
        """Send messages now."""
        if not letters:
            return
        assert self._transport is not None, "a process without transport has all roles itself"
        encoded: dict[int, msgspec.Raw] = {}  # by id: mostly several receivers get one message
        for (sender, receiver), messages in letters.items():
            for start in range(0, len(messages), _MESSAGES_PER_ENVELOPE_MAX):
                part = messages[start : start + _MESSAGES_PER_ENVELOPE_MAX]
                for message in part:
                    if id(message) not in encoded:
                        encoded[id(message)] = message_encoded(message)
                    self._metrics.sent[type(message).__name__] += 1
                raws = [encoded[id(message)] for message in part]
                self._send_envelope(self._transport, sender, receiver, raws)
        self._transport.flush()

    def clear(self) -> None:
        """Forget everything: the shell has failed."""
        self._waiting.clear()
        self._early.clear()

    def _send_envelope(
        self,
        transport: Transport,
        sender: NodeId,
        receiver: NodeId,
        messages: Sequence[msgspec.Raw],
    ) -> None:
        view = self._views[-1].number
        frame = envelope_packed(view, self._epoch, sender, receiver, messages)
        if len(frame) > self._frame_bytes_max and len(messages) > 1:
            middle = len(messages) // 2
            self._send_envelope(transport, sender, receiver, messages[:middle])
            self._send_envelope(transport, sender, receiver, messages[middle:])
            return
        self._metrics.sent_bytes += len(frame)
        transport.send(receiver, frame)
