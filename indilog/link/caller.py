"""Calls functions over a link, from a `Context` in a worker or from a client.

A call carries the session's position, and its answer carries the new one, even if it is a failure
(PITFALLS 5).
"""

from __future__ import annotations

from indilog.base.errors import CallOutcomeUnknownError, NotReadyError
from indilog.base.log import Session
from indilog.link.link_messages import (
    Accepted,
    Answer,
    CallFunction,
    Failed,
    LinkLostError,
    Returned,
    SendFunction,
    error_from,
)
from indilog.link.remote import Asker


class LinkCaller:
    """Calls functions through the compute node, which chooses the worker or node that runs them.

    Args:
        asker: a link to the compute node, or a client.
        depth: nesting depth of the calls: one more than that of the calling function.
    """

    __slots__ = ("_asker", "_depth")

    def __init__(self, asker: Asker, depth: int) -> None:
        self._asker = asker
        self._depth = depth

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = ""
    ) -> bytes:
        """Run `app.function` and return its result as JSON text."""
        answer = await self._asker.ask(
            CallFunction(function, arguments, session.position, self._depth, key)
        )
        if isinstance(answer, Returned):
            session.saw(answer.position)
            return answer.result
        raise _call_error(answer, function, session)

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float, key: str = ""
    ) -> str:
        """Start `app.function` later and return the invocation's id."""
        answer = await self._asker.ask(
            SendFunction(function, arguments, session.position, delay_s, key)
        )
        if isinstance(answer, Accepted):
            return answer.invocation
        raise _call_error(answer, function, session)


def _call_error(answer: Answer, function: str, session: Session) -> Exception:
    if not isinstance(answer, Failed):
        return NotReadyError(f"The compute node answered with {type(answer).__name__}.")
    session.saw(answer.position)
    if answer.kind == LinkLostError.__name__:
        return CallOutcomeUnknownError(
            f"The connection was lost before {function} answered; it may have had effects."
        )
    return error_from(answer)
