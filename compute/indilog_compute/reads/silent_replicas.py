"""Storage nodes that did not answer a read in time.

They are asked after the others, because the shards of a lost storage node may be copied for hours
(decision 0048). After a pause one read tries such a node again; the pause doubles while it does not
answer. If only silent nodes could answer, one of them is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from indilog.base.ids import Instant, NodeId

_PAUSE_DOUBLINGS_MAX: Final = 5


class _Silence:
    """The silence of one node.

    Attributes:
        since: when a read of the node last timed out.
        tried_again: when the node is tried again.
        pause_s: the pause between the two, seconds.
    """

    __slots__ = ("pause_s", "since", "tried_again")

    def __init__(self, pause_s: float, now: Instant) -> None:
        self.pause_s = pause_s
        self.since = now
        self.tried_again = Instant(now + pause_s)


class SilentReplicas:
    """Chooses replicas in turn, those that answer before the silent ones.

    Args:
        pause_s: how long a node is not asked after its first timeout, seconds; doubled up to 32
            times that.
    """

    __slots__ = ("_pause_s", "_silent")

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._silent: dict[NodeId, _Silence] = {}

    def answered(self, node: NodeId) -> None:
        """Note an answer of a node, however late."""
        if self._silent:
            self._silent.pop(node, None)

    def timed_out(self, nodes: Collection[NodeId], asked_at: Instant, now: Instant) -> None:
        """Note that nodes did not answer what they were asked at `asked_at`."""
        for node in nodes:
            silence = self._silent.get(node)
            if silence is None:
                self._silent[node] = _Silence(self._pause_s, now)
            elif asked_at >= silence.since:  # else it shows nothing new
                longest = self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
                silence.pause_s = min(2 * silence.pause_s, longest)
                silence.since, silence.tried_again = now, Instant(now + silence.pause_s)

    def pick(self, replicas: Sequence[NodeId], turn: int, now: Instant) -> NodeId:
        """Return one of `replicas`, of which there is at least one."""
        first = turn % len(replicas)
        if not self._silent:
            return replicas[first]
        in_turn = (*replicas[first:], *replicas[:first])
        for node in in_turn:
            silence = self._silent.get(node)
            if silence is None:
                return node
            if silence.tried_again <= now:
                silence.tried_again = Instant(now + silence.pause_s)
                return node
        return min(in_turn, key=lambda node: self._silent[node].tried_again)
