"""The trims that callers on this compute node wait for (ARCHITECTURE 13).

`Trims` sends `TrimWanted` to the primary, and resends it until the primary answers with the metalog
position of the trim. `Trims` answers the caller after this engine has applied the metalog up to
that position. A repeated `TrimWanted` is harmless, because a floor only grows. `LocalLog.trim`
starts a trim; `Engine` drives `Trims`.
"""

from __future__ import annotations

from typing import NamedTuple

from indilog.base.errors import IndilogError, OverloadedError, QuorumUnavailableError
from indilog.base.ids import Instant, MetalogPosition
from indilog.base.log import check_until
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.metalog import Floor
from indilog.roles.leadership import Leadership
from indilog.roles.metalog_reader import MetalogReader
from indilog.roles.role import Answer, Effect, Ignore, Send
from indilog.wire.tag_messages import TrimIs, TrimWanted
from indilog_compute.reads.operation import Answered


class _Trim(NamedTuple):
    floor: Floor
    waiter: object
    expires: Instant
    resend: Resend
    position: MetalogPosition | None = None
    """The metalog position of the trim; None: the primary has not answered."""

    def deadline(self) -> Instant:
        """When to resend the trim, or to fail it."""
        return min(self.resend.due or self.expires, self.expires)


class Trims:
    """The trims of one engine that are in flight; at most `trims_pending_max`."""

    def __init__(self, leadership: Leadership, config: NodeConfig) -> None:
        self._leadership = leadership
        self._trims_max = config.trims.trims_pending_max
        self._resend_s = config.messages.resend_s, config.messages.resend_s_max
        self._timeout_s = config.reads.read_timeout_s
        self._starting: list[tuple[Floor, object]] = []
        self._under_way: dict[int, _Trim] = {}
        self._next_request = 0

    def __len__(self) -> int:
        return len(self._starting) + len(self._under_way)

    def number_from(self, request: int) -> None:
        """Number requests above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    def start(self, floor: Floor, waiter: object) -> None:
        """Start a trim.

        Raises:
            OverloadedError: too many are in flight.
        """
        if len(self) >= self._trims_max:
            raise OverloadedError(f"{len(self):,} trims are under way; try again later.")
        self._starting.append((floor, waiter))

    def make_due(self, now: Instant) -> None:
        """Send unanswered trims again, because another node is the primary."""
        for trim in self._under_way.values():
            trim.resend.make_due(now)

    def on_answer(self, message: TrimIs, reader: MetalogReader) -> list[Effect]:
        """Note the position of a trim, as answered by the primary. `reader` learns that the entries
        up to this position exist.
        """
        reader.known_end = max(reader.known_end, message.position or 0)
        trim = self._under_way.get(message.request)
        if trim is None or trim.position is not None:
            return []
        if message.position is None:
            try:
                check_until(trim.floor.until, message.tail)
            except ValueError as error:
                del self._under_way[message.request]
                return [Answer(trim.waiter, error)]
            return [Ignore(message, "a refusal of a trim that is not beyond the tail")]
        trim.resend.stop()
        self._under_way[message.request] = trim._replace(position=message.position)
        return []

    def advance(self, position: MetalogPosition, now: Instant) -> list[Effect]:
        """Answer the callers of the trims that are applied at `position`. Send new trims, resend
        unanswered trims, and fail expired trims.

        Each trim is resent after its own pauses, which answers to other trims do not change.
        """
        effects: list[Effect] = []
        for floor, waiter in self._starting:
            self._next_request += 1
            expires, resend = Instant(now + self._timeout_s), Resend(*self._resend_s)
            self._under_way[self._next_request] = _Trim(floor, waiter, expires, resend)
            effects.append(self._send(self._next_request, now))
        self._starting.clear()
        for request, trim in list(self._under_way.items()):
            if trim.position is not None and trim.position <= position:
                del self._under_way[request]
                effects.append(Answer(trim.waiter, Answered(None, trim.position)))
            elif now >= trim.expires:
                del self._under_way[request]
                effects.append(Answer(trim.waiter, self._unavailable()))
            elif trim.resend.is_due(now):
                effects.append(self._send(request, now))
        return effects

    def _send(self, request: int, now: Instant) -> Send:
        trim = self._under_way[request]
        assert trim.position is None, "only unanswered trims are sent"
        trim.resend.sent(now)
        return Send(self._leadership.primary, TrimWanted(request, trim.floor))

    def deadline(self) -> Instant | None:
        """When to resend a trim, or to fail it after `read_timeout_s`; None: there is no trim."""
        return min((trim.deadline() for trim in self._under_way.values()), default=None)

    def check_invariants(self) -> None:
        """Assert the limit, and that no answered trim is resent."""
        assert len(self) <= self._trims_max, "more trims than allowed"
        for request, trim in self._under_way.items():
            assert request <= self._next_request, "requests are numbered upwards"
            assert trim.position is None or trim.resend.due is None, "an answer ends the resends"

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every trim. A trim that was not sent fails with `error`; a sent one may still take
        effect, so it fails with `QuorumUnavailableError`.
        """
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
