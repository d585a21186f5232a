"""Checks of session positions: a position that the log has not reached is refused at once.

A read waits until this node has applied the position of its session. A client may send a position
that it made up or got from another platform. Without this check, a read at such a position would
fail as retryable after `read_timeout_s`, and each retry would fail in the same way. The gateway and
the worker host call `Positions` before they accept a position.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from indilog.base.ids import MetalogPosition
from indilog.base.log import LogSource, Session


@runtime_checkable
class HasPosition(Protocol):
    """Logs that know which metalog position is applied at this node."""

    @property
    def position(self) -> MetalogPosition:
        """The metalog position that this node has applied."""


class Positions:
    """Knows which positions the log has reached.

    Args:
        logs: the log; its tail is read if a position is ahead of the known ones.
    """

    def __init__(self, logs: LogSource) -> None:
        self._logs = logs
        # Tested here, once: `isinstance` with a protocol costs as much as an append.
        self._applied = logs if isinstance(logs, HasPosition) else None
        self._reached: MetalogPosition = 0

    def is_known(self, position: MetalogPosition) -> bool:
        """Whether a position is known to be reached, without asking the log."""
        if position <= self._reached:
            return True
        return self._applied is not None and position <= self._applied.position

    async def fault(self, position: MetalogPosition) -> str | None:
        """Return what is wrong with a position, as the end of a sentence whose subject is the
        position; None: the log has reached the position.

        Raises:
            NotReadyError, QuorumUnavailableError: the tail of the log cannot be read now.
        """
        if self.is_known(position):
            return None
        session = Session()
        await self._logs.log("positions", session).tail()
        self._reached = max(self._reached, session.position)
        if position <= self._reached:
            return None
        return f"is {position}, but the log is at {self._reached}; is it another log's?"
