"""Tracks *silent* nodes, which did not answer in time: index nodes, aggregators and storage nodes.

Silent nodes are asked after all other nodes, because they may stay silent for long. Copying the
shards of a lost storage node may take hours (decision 0048), and a lost index node may be restarted
late. After a pause, one question tries a silent node again; the pause doubles while the node does
not answer. If all candidates are silent, one of them is asked. So avoiding silent nodes may
unbalance the load, but never prevents an answer.

`LookupRoutes` chooses index nodes and aggregators by `SilentNodes`; `StorageQuestions` chooses
storage nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from indilog.base.ids import Instant, NodeId

_PAUSE_DOUBLINGS_MAX: Final = 5


class _Silence:
    """The silence of one node.

    Attributes:
        since: when a question to the node last timed out.
        tried_again: the time from which on the node may be tried again.
        pause_s: seconds from the last timeout or trial to `tried_again`.
    """

    __slots__ = ("pause_s", "since", "tried_again")

    def __init__(self, pause_s: float, now: Instant) -> None:
        self.pause_s = pause_s
        self.since = now
        self.tried_again = Instant(now + pause_s)


class SilentNodes:
    """Chooses nodes in rotation; silent nodes come last.

    Args:
        pause_s: seconds for which a node is not asked after its first timeout; the pause doubles up
            to 32 times this value.
    """

    __slots__ = ("_pause_s", "_silent")

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._silent: dict[NodeId, _Silence] = {}

    def __len__(self) -> int:
        """Number of silent nodes."""
        return len(self._silent)

    def __contains__(self, node: NodeId) -> bool:
        """Whether a node is silent."""
        return node in self._silent

    def answered(self, node: NodeId) -> None:
        """Note that a node has answered, even if the answer was late."""
        if self._silent:
            self._silent.pop(node, None)

    def timed_out(self, nodes: Collection[NodeId], asked_at: Instant, now: Instant) -> None:
        """Note that nodes did not answer a question that was sent at `asked_at`."""
        for node in nodes:
            silence = self._silent.get(node)
            if silence is None:
                self._silent[node] = _Silence(self._pause_s, now)
            elif asked_at >= silence.since:  # an older question does not double the pause
                longest = self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
                silence.pause_s = min(2 * silence.pause_s, longest)
                silence.since, silence.tried_again = now, Instant(now + silence.pause_s)

    def pick(
        self, nodes: Sequence[NodeId], rotation: int, now: Instant, *, trial: bool = False
    ) -> tuple[NodeId, bool]:
        """Return one of `nodes`, and whether the question tries a silent node again.

        `nodes` are the candidates, at least one. `rotation` selects the first candidate. `trial`
        says whether the question already tries another silent node again.
        """
        first = rotation % len(nodes)
        if not self._silent:
            return nodes[first], trial
        rotated = (*nodes[first:], *nodes[:first])
        for node in rotated:
            silence = self._silent.get(node)
            if silence is None:
                return node, trial
            if not trial and silence.tried_again <= now:
                silence.tried_again = Instant(now + silence.pause_s)
                return node, True
        return min(rotated, key=lambda node: self._silent[node].tried_again), trial

    def keep(self, nodes: Collection[NodeId]) -> None:
        """Forget all silent nodes that are not in `nodes`."""
        self._silent = {node: s for node, s in self._silent.items() if node in nodes}

    def check_invariants(self, nodes: Collection[NodeId]) -> None:
        """Assert that only `nodes` are silent, and that pauses are bounded."""
        assert self._silent.keys() <= set(nodes), "only nodes that are asked are silent"
        for silence in self._silent.values():
            assert self._pause_s <= silence.pause_s <= self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
            assert silence.since <= silence.tried_again, "a node is tried after its pause"
