"""The states of recorded invocations and of held outcomes, as clients get them.

`indilog.remote_client` creates them from the answers of a compute node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from indilog.base.errors import NotReadyError
from indilog.link.link_messages import Failed, InvocationFound, Returned, error_from


class Invocation(NamedTuple):
    """The state of a recorded invocation.

    Attributes:
        id: id of the invocation, as `send` returned it.
        function: `app.function`.
        state: one of `scheduled`, `running`, `done`, `failed`.
        outcome: its result or error; None if the invocation has not ended.
    """

    id: str
    function: str
    state: str
    outcome: Returned | Failed | None

    def result(self) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the function's result.

        Raises:
            NotReadyError: the invocation has not ended.
            InvocationCancelledError: the invocation was cancelled.
            IndilogError: the invocation failed; the error is the one that `call` would raise.
        """
        match self.outcome:
            case None:
                raise NotReadyError(f"Invocation {self.id} has not ended: {self.state}.")
            case Returned(result=result):
                return msgspec.json.decode(result)
            case failure:
                raise error_from(failure)


class HeldForRun(msgspec.Struct, frozen=True):
    """The outcomes that are held for a workflow run until the run has recorded them.

    `log`: the log of the run's flow. `run`: id of the run. `calls`: number of calls with a held
    outcome. `bytes`: their size in bytes.
    """

    log: str
    run: str
    calls: int
    bytes: int


class HeldOutcomes(msgspec.Struct, frozen=True):
    """The first 1,000 runs for which outcomes are held. `has_more`: there may be further runs."""

    held: tuple[HeldForRun, ...]
    has_more: bool


class ReleasedOutcomes(msgspec.Struct, frozen=True):
    """The answer to `DELETE /invocations/held`: the number of calls with a released outcome."""

    released: int


def invocation_of(message: InvocationFound) -> Invocation | None:
    """Return the invocation in a message; None if the node does not know it."""
    if not message.function:
        return None
    return Invocation(message.invocation, message.function, message.state, message.outcome)
