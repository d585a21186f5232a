"""Trims that callers of a compute node wait for (ARCHITECTURE 13).

A trim is wanted from the primary, again and again until it says which metalog position has it; the
caller is answered when this engine has applied the metalog so far. Wanting it twice is harmless: a
floor only grows.
"""

from __future__ import annotations

from typing import NamedTuple

from indilog.base.errors import IndilogError, OverloadedError, QuorumUnavailableError
from indilog.base.ids import Instant, MetalogPosition, NodeId
from indilog.base.log import check_until
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.metalog import Floor
from indilog.roles.role import Answer, Effect, Ignore, Send
from indilog.wire.tag_messages import TrimIs, TrimWanted
from indilog_compute.catch_up import CatchUp
from indilog_compute.reads.operation import Answered


class _Trim(NamedTuple):
    floor: Floor
    waiter: object
    created: Instant
    position: MetalogPosition | None
    """Which metalog position has it, once the primary has said so."""


class Trims:
    """The trims under way of one engine; at most `trims_pending_max`."""

    def __init__(self, primary: NodeId, config: NodeConfig) -> None:
        self._primary = primary
        self._trims_max = config.trims.trims_pending_max
        self._resend = Resend(config.messages.resend_s, config.messages.resend_s_max)
        self._timeout_s = config.reads.read_timeout_s
        self._starting: list[tuple[Floor, object]] = []
        self._under_way: dict[int, _Trim] = {}
        self._next_request = 0

    def __len__(self) -> int:
        return len(self._starting) + len(self._under_way)

    def number_from(self, request: int) -> None:
        """Number requests above `request`, so that answers to an earlier life find nothing."""
        self._next_request = request

    def start(self, floor: Floor, waiter: object) -> None:
        """Take a trim on.

        Raises:
            OverloadedError: too many are under way.
        """
        if len(self) >= self._trims_max:
            raise OverloadedError(f"{len(self):,} trims are under way; try again later.")
        self._starting.append((floor, waiter))

    def on_answer(self, message: TrimIs, catch_up: CatchUp) -> list[Effect]:
        """Take in the primary's word, and that there are so many entries."""
        catch_up.reader.known_end = max(catch_up.reader.known_end, message.position or 0)
        trim = self._under_way.get(message.request)
        if trim is None or trim.position is not None:
            return []
        if message.position is None:
            try:
                check_until(trim.floor.until, message.tail)
            except ValueError as error:
                del self._under_way[message.request]
                return [Answer(trim.waiter, error)]
            return [Ignore(message, "a trim refused that reaches not beyond the tail")]
        self._under_way[message.request] = trim._replace(position=message.position)
        return []

    def advance(self, position: MetalogPosition, now: Instant) -> list[Effect]:
        """Answer what is applied at `position`; say what is new, and again what was not heard."""
        effects: list[Effect] = []
        for request, trim in list(self._under_way.items()):
            if trim.position is not None and trim.position <= position:
                del self._under_way[request]
                effects.append(Answer(trim.waiter, Answered(None, trim.position)))
            elif now >= trim.created + self._timeout_s:
                del self._under_way[request]
                effects.append(Answer(trim.waiter, self._unavailable()))
        if self._under_way and self._resend.is_due(now):
            effects += self._send(self._under_way, now)
        if self._starting:
            first = self._next_request + 1
            for floor, waiter in self._starting:
                self._next_request += 1
                self._under_way[self._next_request] = _Trim(floor, waiter, now, None)
            self._starting.clear()
            self._resend.progressed()
            effects += self._send(range(first, self._next_request + 1), now)
        return effects

    def _send(self, requests: range | dict[int, _Trim], now: Instant) -> list[Effect]:
        self._resend.sent(now)
        return [
            Send(self._primary, TrimWanted(request, self._under_way[request].floor))
            for request in requests
            if self._under_way[request].position is None
        ]

    def deadline(self) -> Instant | None:
        """When to send something again, or when the oldest trim has taken `read_timeout_s`."""
        if not self._under_way:
            return None
        expires = Instant(next(iter(self._under_way.values())).created + self._timeout_s)
        return min(self._resend.due or expires, expires)

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every trim: with `error` what nobody was told of, the rest may still happen."""
        effects: list[Effect] = [Answer(waiter, error) for _, waiter in self._starting]
        unsure = QuorumUnavailableError(
            "The platform was closed before the trim was confirmed; it may still happen. Trimming "
            "again is harmless."
        )
        effects += [Answer(trim.waiter, unsure) for trim in self._under_way.values()]
        self._starting.clear()
        self._under_way.clear()
        return effects

    def _unavailable(self) -> QuorumUnavailableError:
        return QuorumUnavailableError(
            f"The trim was not confirmed within {self._timeout_s:g} s and may still happen; try "
            "again, twice does no harm."
        )
