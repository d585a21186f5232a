"""Wakes readers that wait for records of other compute nodes (decision 0098).

A reader may wait for records of a log of another kind than `shared`. The reader's node then asks
the nodes that may append to this log. They answer when the log has grown, and the reader reads the
log. Correctness does not depend on answers: if an answer is lost, late or wrong, the reader itself
looks for new cells, which it does at least once a second.

`LocalLogs` passes the waits of this node's readers, and the growth of its open logs, to
`LogGrowth`; `Engine` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from indilog.base.errors import IndilogError, OverloadedError
from indilog.base.ids import Instant, NodeId
from indilog.config import NodeConfig
from indilog.roles.role import Answer, Effect, Send
from indilog.wire.growth_messages import GrowthWanted, LogGrew

_WAIT_S: Final = 1.0
"""Seconds after which a wait ends without an answer; the caller may then wait again."""
_HAS_GROWN: Final = True
_NO_ANSWER: Final = False
_REMEMBERED_S: Final = 2 * _WAIT_S
"""Seconds for which a request of another node is kept; the other node waits for a shorter time."""


class _Wait(NamedTuple):
    """A wait of a reader on this node."""

    message: GrowthWanted
    nodes: Sequence[NodeId]
    waiter: object
    expires: Instant | None = None
    """When the wait ends; None: its request was not sent yet."""


class _Wanted(NamedTuple):
    """The newest request of another node about one log."""

    message: GrowthWanted
    expires: Instant


class LogGrowth:
    """Keeps at most `lookups_pending_max` waits of one compute node, and as many requests of other
    nodes. Further requests of other nodes are ignored.

    Attributes:
        position_of: returns how many cells of the log in a folder this node has applied; None: the
            log is not open here.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._limit = config.reads.lookups_pending_max
        self.position_of: Callable[[str], int | None] = lambda _: None
        self._waits: dict[int, _Wait] = {}
        self._starting: list[int] = []
        """Waits that are not sent yet."""
        self._next_request = 0
        self._wanted: dict[str, dict[NodeId, _Wanted]] = {}
        """By folder and node, the requests of other nodes."""
        self._wanted_count = 0
        self._forget_at = Instant(0.0)
        self._answers: list[Effect] = []

    def __len__(self) -> int:
        """Return how many messages are to be sent. Waits may be there all the time, so they do not
        count: else each append of the node would look after them.
        """
        return len(self._starting) + len(self._answers)

    def number_from(self, request: int) -> None:
        """Number requests above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    # --- waits of this node

    def wait(self, nodes: Sequence[NodeId], folder: str, position: int, waiter: object) -> None:
        """Ask `nodes` to answer when the log in `folder` has more than `position` cells. The waiter
        gets True after the first answer, or False after a second without an answer.

        Raises:
            OverloadedError: too many readers wait already.
        """
        if len(self._waits) >= self._limit:
            raise OverloadedError(f"{len(self._waits):,} readers wait for other nodes; try later.")
        self._next_request += 1
        message = GrowthWanted(self._next_request, folder, position)
        self._waits[self._next_request] = _Wait(message, nodes, waiter)
        self._starting.append(self._next_request)

    def advance(self, now: Instant) -> list[Effect]:
        """Send new requests and answers; end expired waits, and forget expired requests."""
        effects, self._answers = self._answers, []
        for request in self._starting:
            wait = self._waits[request]
            self._waits[request] = wait._replace(expires=Instant(now + _WAIT_S))
            effects += [Send(node, wait.message) for node in wait.nodes]
        self._starting.clear()
        for request, wait in list(self._waits.items()):
            if wait.expires is not None and now >= wait.expires:
                del self._waits[request]
                effects.append(Answer(wait.waiter, _NO_ANSWER))
        return effects

    def deadline(self) -> Instant | None:
        """When the next wait ends; None: no request was sent."""
        return min((w.expires for w in self._waits.values() if w.expires is not None), default=None)

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every wait."""
        waits = list(self._waits.values())
        self._waits.clear()
        self._starting.clear()
        return [Answer(wait.waiter, error) for wait in waits]

    # --- messages of other nodes

    def on_message(
        self, sender: NodeId, message: GrowthWanted | LogGrew, now: Instant
    ) -> list[Effect]:
        """Handle a request or an answer of another compute node."""
        if isinstance(message, GrowthWanted):
            return self._on_wanted(sender, message, now)
        wait = self._waits.pop(message.request, None)
        return [] if wait is None else [Answer(wait.waiter, _HAS_GROWN)]

    def _on_wanted(self, sender: NodeId, message: GrowthWanted, now: Instant) -> list[Effect]:
        """Answer a request at once if the log has grown already; otherwise keep the request."""
        position = self.position_of(message.folder)
        if position is not None and position > message.position:
            return [Send(sender, LogGrew(message.request))]
        if now >= self._forget_at:
            self._forget_expired(now)
            self._forget_at = Instant(now + _WAIT_S)
        is_new = sender not in self._wanted.get(message.folder, {})
        if self._wanted_count + is_new <= self._limit:
            wanted = self._wanted.setdefault(message.folder, {})
            wanted[sender] = _Wanted(message, Instant(now + _REMEMBERED_S))
            self._wanted_count += is_new
        return []

    def grew(self, folder: str, position: int) -> bool:
        """Note that the log in `folder` has `position` cells now. Return whether another node gets
        an answer when the engine's iteration ends.
        """
        if (wanted := self._wanted.get(folder)) is None:
            return False
        grown = {node for node, (message, _) in wanted.items() if message.position < position}
        for node in grown:
            self._answers.append(Send(node, LogGrew(wanted.pop(node).message.request)))
        self._wanted_count -= len(grown)
        if not wanted:
            del self._wanted[folder]
        return bool(grown)

    def _forget_expired(self, now: Instant) -> None:
        for folder, wanted in list(self._wanted.items()):
            for node in [node for node, (_, expires) in wanted.items() if now >= expires]:
                del wanted[node]
                self._wanted_count -= 1
            if not wanted:
                del self._wanted[folder]

    def check_invariants(self) -> None:
        """Assert the limits."""
        assert len(self._waits) <= self._limit, "more waits than allowed"
        assert self._waits.keys() >= set(self._starting), "a wait ends after it was sent"
        assert self._wanted_count == sum(map(len, self._wanted.values())) <= self._limit
        assert all(self._wanted.values()), "a log without requests is forgotten"
