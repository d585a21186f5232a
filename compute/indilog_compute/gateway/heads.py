"""Checks the head of every request (its path, query and headers) before the request is routed.

Path and query must be UTF-8. A client may send the header `Indilog-Position` with the metalog
position of its session, which it got in an earlier answer. A read waits until this node has applied
that position. So a position beyond the end of the metalog is refused at once. `GatewayApp` calls
`Heads`, which asks `Positions`.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from indilog.base.errors import InvalidArgumentsError
from indilog_compute.positions import Positions

POSITION_HEADER: Final = b"indilog-position"
POSITION_DIGITS_MAX: Final = 18
"""Every number of at most this many digits fits into a signed integer of 64 bits."""


class Heads:
    """Checks the heads of requests.

    Args:
        positions: knows which metalog positions the log has reached.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions

    async def check(self, scope: Scope) -> None:
        """Check one head.

        Raises:
            InvalidArgumentsError: the path or the query is not UTF-8, or the session's position is
                not a number or is beyond the end of the metalog.
            NotReadyError, QuorumUnavailableError: the end of the metalog cannot be read now.
        """
        if b"%" in scope.get("raw_path", b"") or b"%" in scope["query_string"]:
            _check_text(scope)
        for name, value in scope["headers"]:
            if name == POSITION_HEADER:
                await self._check_position(value)

    async def _check_position(self, value: bytes) -> None:
        if not value.isdigit() or len(value) > POSITION_DIGITS_MAX:
            given = value.decode("latin-1")[:40]
            raise _refusal(f"must be a position from an earlier answer, and is {given!r}")
        position = int(value)
        if not self._positions.is_known(position) and (
            fault := await self._positions.fault(position)
        ):
            raise _refusal(fault)


def _check_text(scope: Scope) -> None:
    for what, text in (("path", scope.get("raw_path", b"")), ("query", scope["query_string"])):
        try:
            unquote_to_bytes(text).decode()
        except UnicodeDecodeError:
            fault = {"field": what, "problem": "is not UTF-8"}
            sentence = f"Nothing was done: the {what} of the request is not UTF-8."
            raise InvalidArgumentsError(sentence, [fault]) from None


def _refusal(problem: str) -> InvalidArgumentsError:
    sentence = f"Nothing was done: the header Indilog-Position {problem}."
    return InvalidArgumentsError(sentence, [{"field": "Indilog-Position", "problem": problem}])
