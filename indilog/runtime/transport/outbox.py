"""Keeps messages from roles to other processes until they may be sent (ARCHITECTURE 5).

A message waits for the sync of all earlier writes if its sender may depend on unsynced data. One
exception can be enabled: messages that promise nothing (`Message.promises`) leave early. All
messages of an iteration from one node to another are sent in one `Envelope`, or in a few if they
are many or large. `NodeShell` owns the outbox, and decides when it sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from indilog.base.ids import Epoch, NodeId
from indilog.base.metrics import Metrics
from indilog.config import Config
from indilog.runtime.transport.transport import Transport
from indilog.wire.envelope import encode_message, pack_envelope
from indilog.wire.messages import Message

_MESSAGES_PER_ENVELOPE_MAX: Final = 64

Letters: TypeAlias = Mapping[tuple[NodeId, NodeId], Sequence[Message]]
"""Messages by sender and receiver."""


class Outbox:
    """Collects messages. Its owner calls the methods that send them.

    Args:
        transport: the transport that sends the messages; None: there is no other process.
        epoch: epoch of this process.
        config: settings of this process.
        metrics: counts sent messages.
        waiting: the nodes of this process whose messages wait for the sync.
        early: whether messages of these nodes leave before the sync if they promise nothing. It
            must be False if roles of this process pass each other unsynced data. Otherwise a
            metalog entry could be sent that depends on the report of a storage node in this
            process, while the records of that report could still be lost.
    """

    def __init__(
        self,
        transport: Transport | None,
        epoch: Epoch,
        config: Config,
        metrics: Metrics,
        *,
        waiting: Collection[NodeId],
        early: bool,
    ) -> None:
        self._waits = waiting
        self._leave_early = early
        self._transport = transport
        self._epoch = epoch
        self._frame_bytes_max = config.cluster.message_bytes_max
        self._metrics = metrics
        self._waiting: dict[tuple[NodeId, NodeId], list[Message]] = {}
        self._early: dict[tuple[NodeId, NodeId], list[Message]] = {}
        """Messages that do not wait for a sync; empty between iterations."""

    def __bool__(self) -> bool:
        """Whether messages wait for a sync."""
        return bool(self._waiting)

    def put(self, sender: NodeId, receiver: NodeId, message: Message) -> None:
        """Keep a message until it may be sent."""
        is_early = sender not in self._waits or (self._leave_early and not message.promises)
        box = self._early if is_early else self._waiting
        box.setdefault((sender, receiver), []).append(message)

    def send_early(self) -> None:
        """Send the messages that do not wait for a sync."""
        if self._early:
            early, self._early = self._early, {}
            self.send(early)

    def take(self) -> Letters:
        """Remove and return the messages that wait for a sync."""
        taken, self._waiting = self._waiting, {}
        return taken

    def send(self, letters: Letters) -> None:
        """Send messages now."""
        if not letters:
            return
        assert self._transport is not None, "a process without transport has all roles"
        encoded: dict[int, msgspec.Raw] = {}  # by id: most messages go to several receivers
        for (sender, receiver), messages in letters.items():
            for start in range(0, len(messages), _MESSAGES_PER_ENVELOPE_MAX):
                part = messages[start : start + _MESSAGES_PER_ENVELOPE_MAX]
                for message in part:
                    if id(message) not in encoded:
                        encoded[id(message)] = encode_message(message)
                    self._metrics.sent[type(message).__name__] += 1
                raws = [encoded[id(message)] for message in part]
                self._send_envelope(self._transport, sender, receiver, raws)
        self._transport.flush()

    def clear(self) -> None:
        """Drop all messages, because the shell has failed."""
        self._waiting.clear()
        self._early.clear()

    def _send_envelope(
        self,
        transport: Transport,
        sender: NodeId,
        receiver: NodeId,
        messages: Sequence[msgspec.Raw],
    ) -> None:
        frame = pack_envelope(self._epoch, sender, receiver, messages)
        if len(frame) > self._frame_bytes_max and len(messages) > 1:
            middle = len(messages) // 2
            self._send_envelope(transport, sender, receiver, messages[:middle])
            self._send_envelope(transport, sender, receiver, messages[middle:])
            return
        self._metrics.sent_bytes += len(frame)
        transport.send(receiver, frame)
