"""The fence of a process, which accepts only frames of the newest incarnation of a node
(ARCHITECTURE 11).

Every start of a process takes an epoch greater than all earlier ones, and every frame carries the
epoch. An older incarnation may be paused instead of dead. So after a frame of a new incarnation, a
receiver refuses frames of older incarnations. This fence is in memory only. The writer of a shard,
and the primary, must also be fenced after a restart of the receiver; roles do this durably, with
separate epochs. `NodeShell` passes each received frame through its `Fence`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeAlias

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, NodeId
from indilog.wire.envelope import Envelope, decode_envelope

MALFORMED: Final = "malformed frame"
"""The reason for frames that cannot be read, for example from a release with another envelope."""
_SENDERS_MAX: Final = 4096
"""Largest number of nodes whose incarnations are kept. A view has fewer nodes."""


class RefusedFrame(NamedTuple):
    """A refused frame. `reason` is one of a few constants, and `detail` is for log lines."""

    reason: str
    detail: object


Admission: TypeAlias = Envelope | RefusedFrame


class Fence:
    """Admits or refuses received frames, one by one.

    Args:
        receivers: the nodes of this process.
        on_unknown: called with the sender and the kind of each message of a kind that this release
            does not know.
    """

    def __init__(
        self,
        receivers: Collection[NodeId],
        on_unknown: Callable[[NodeId, str], object] = lambda *_: None,
    ) -> None:
        self._receivers = receivers
        self._on_unknown = on_unknown
        self._newest: dict[NodeId, Epoch] = {}
        """The greatest epoch received from each node."""

    def admit(self, frame: bytes) -> Admission:
        """Return the envelope in `frame`, or the reason why the frame is refused."""
        try:
            envelope = decode_envelope(frame, self._on_unknown)
        except MalformedFrameError as error:
            return RefusedFrame(MALFORMED, error)
        if envelope.receiver not in self._receivers:
            return RefusedFrame("frame for another node", envelope.receiver)
        newest = self._newest.get(envelope.sender)
        if newest is None and len(self._newest) >= _SENDERS_MAX:
            return RefusedFrame("frame of one node too many", envelope.sender)
        if newest is not None and envelope.epoch < newest:
            return RefusedFrame("frame of an old incarnation", envelope.sender)
        self._newest[envelope.sender] = envelope.epoch
        return envelope
