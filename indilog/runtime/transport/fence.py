"""The fence of a process, which accepts only frames of its own view, from the newest incarnation of
a node in that view (ARCHITECTURE 11).

Every start of a process takes an epoch greater than all earlier ones, and every frame carries the
epoch. So after a frame of a new incarnation, a receiver accepts no frame of an older incarnation
that was paused. This fence is in memory only. The writer of a shard, and the primary, must also be
fenced after a restart of the receiver; roles do this durably, with separate epochs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, NodeId
from indilog.kernel.view import Views
from indilog.wire.envelope import Envelope, envelope_decoded


class RefusedFrame(NamedTuple):
    """A refused frame; `reason` is one of a few constants, `detail` is for people."""

    reason: str
    detail: object


Admission: TypeAlias = Envelope | RefusedFrame


class Fence:
    """Admits or refuses received frames, one by one.

    Args:
        receivers: the nodes of this process.
        views: the newest last; referenced, not copied.
    """

    def __init__(self, receivers: Collection[NodeId], views: Views) -> None:
        self._receivers = receivers
        self._views = views
        self._senders_of = 0
        """The view whose nodes are the keys of `_newest`."""
        self._newest: dict[NodeId, Epoch] = {}
        """The greatest epoch received from each node of the view."""

    def admit(self, frame: bytes) -> Admission:
        """Return the envelope in `frame`, or the reason of its refusal."""
        try:
            envelope = envelope_decoded(frame)
        except MalformedFrameError as error:
            return RefusedFrame("malformed frame", error)
        if envelope.receiver not in self._receivers:
            return RefusedFrame("frame for another node", envelope.receiver)
        if envelope.view != self._views[-1].number:
            return RefusedFrame("frame of another view", envelope.view)
        if self._senders_of != envelope.view:
            self._take_senders()
        newest = self._newest.get(envelope.sender)
        if newest is None:
            return RefusedFrame("frame of an unknown node", envelope.sender)
        if envelope.epoch < newest:
            return RefusedFrame("frame of an old incarnation", envelope.sender)
        self._newest[envelope.sender] = envelope.epoch
        return envelope

    def _take_senders(self) -> None:
        view = self._views[-1]
        self._newest = {node: self._newest.get(node, Epoch(0)) for node in view.nodes}
        self._senders_of = view.number
