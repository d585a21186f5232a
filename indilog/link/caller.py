"""Calls functions over a link, from a `Context` in a worker or from a client.

A call carries the session's position. The answer carries the new position, even if the call failed
(PITFALLS 5). The worker's `runner` and `indilog.remote_client` use `LinkCaller`.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.errors import CallOutcomeUnknownError, NotReadyError
from indilog.base.log import Session
from indilog.link.link_messages import (
    Accepted,
    Answer,
    AskHolders,
    CallFunction,
    Done,
    Failed,
    HoldersFound,
    LinkLostError,
    ReleaseCalls,
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
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        """Run `app.function` and return its result as JSON text."""
        answer = await self._asker.ask(
            CallFunction(function, arguments, session.position, self._depth, key, holder)
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

    async def release(self, holder: str, keys: Sequence[str]) -> None:
        """Release the outcomes held for `holder` under these keys; without keys, all of them."""
        answer = await self._asker.ask(ReleaseCalls(holder, tuple(keys)))
        if not isinstance(answer, Done):
            raise _error(answer)

    async def holders(self, prefix: str, after: str, session: Session) -> Sequence[str]:
        """Return a page of the holders of outcomes: names that begin with `prefix` and sort after
        `after`.
        """
        answer = await self._asker.ask(AskHolders(prefix, after))
        if not isinstance(answer, HoldersFound):
            raise _error(answer)
        session.saw(answer.position)
        return answer.holders


def _error(answer: Answer) -> Exception:
    if isinstance(answer, Failed):
        return error_from(answer)
    return NotReadyError(f"The compute node answered with {type(answer).__name__}.")


def _call_error(answer: Answer, function: str, session: Session) -> Exception:
    if not isinstance(answer, Failed):
        return _error(answer)
    session.saw(answer.position)
    if answer.kind == LinkLostError.__name__:
        return CallOutcomeUnknownError(
            f"The connection was lost before {function} answered; it may have had effects."
        )
    return error_from(answer)
