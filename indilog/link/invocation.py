"""A recorded invocation, as a client sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from indilog.base.errors import NotReadyError
from indilog.link.link_messages import Failed, InvocationTold, Returned, error_from


class Invocation(NamedTuple):
    """How far a recorded invocation is.

    Attributes:
        id: of the invocation, as `send` returned it.
        function: `app.function`.
        state: `scheduled`, `running`, `done` or `failed`.
        outcome: what came of it; None: it is not over.
    """

    id: str
    function: str
    state: str
    outcome: Returned | Failed | None

    def result(self) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return what the function returned.

        Raises:
            NotReadyError: it is not over.
            InvocationCancelledError: it was cancelled.
            IndilogError: it failed; as `call` would have raised it.
        """
        match self.outcome:
            case None:
                raise NotReadyError(f"Invocation {self.id} is not over: {self.state}.")
            case Returned(result=result):
                return msgspec.json.decode(result)
            case failure:
                raise error_from(failure)


def invocation_of(told: InvocationTold) -> Invocation | None:
    """Return what a message says of an invocation; None: it is not known."""
    if not told.function:
        return None
    return Invocation(told.invocation, told.function, told.state, told.outcome)
