"""A shard as of a time of the log, for operators.

The state of a shard changes only with its records. So a lease or delay that has ended since the
last record is still in the state. A `ShardView` shows the shard as if a record were ordered now.
`Queue` shows statistics and lists messages by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal, TypeAlias

from bokiqueue.shard_state import Message, ShardState
from indilog.sdk import SeqNum

MessageState: TypeAlias = Literal["ready", "leased", "delayed", "dead"]


class ShardView:
    """The messages of a shard at log time `now`, until further records are applied.

    Attributes:
        depth: number of outstanding messages, without dead letters.
        leased: number of messages under a lease.
        dead: dead letters, in the order in which they died.
    """

    def __init__(self, state: ShardState, now: float) -> None:
        ended = state.ended(now)
        dying = [message for message in ended if message.tries >= message.tries_max]
        self._state = state
        self._now = now
        self._ended = {message.seqnum: message for message in ended}
        self._dying = frozenset([message.seqnum for message in dying])
        self.depth = len(state) - len(dying)
        self.leased = state.leased - sum(message.claim is not None for message in ended)
        self.dead = (*state.dead, *dying)

    def is_dead(self, seqnum: SeqNum) -> bool:
        """Whether a message is a dead letter."""
        message = self._state.message(seqnum)
        return message is not None and self.state_of(message) == "dead"

    def state_of(self, message: Message) -> MessageState:
        """Return the state of a message of the shard."""
        if message.is_dead or message.seqnum in self._dying:
            return "dead"
        if message.until is None or message.seqnum in self._ended:
            return "ready"
        return "delayed" if message.claim is None else "leased"

    @property
    def oldest_age_s(self) -> float:
        """Seconds since the outstanding message that was pushed first; 0: there is none."""
        oldest = self._state.oldest
        if oldest is not None and oldest.seqnum in self._dying:
            oldest = min(self.in_order(), key=lambda message: message.seqnum, default=None)
        return 0.0 if oldest is None else max(0.0, self._now - oldest.pushed_at)

    def in_order(self) -> Iterator[Message]:
        """Return the ready messages in the order of their delivery. Then return the other messages
        in the order in which their leases and delays end.
        """
        if not self._ended:
            return self._state.in_order()
        alive = [m for m in self._state.in_order() if m.seqnum not in self._dying]
        ready = [message for message in alive if self.state_of(message) == "ready"]
        others = [message for message in alive if self.state_of(message) != "ready"]
        return chain(sorted(ready, key=lambda message: message.rank), others)
