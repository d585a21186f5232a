"""Lists the recorded invocations of an `InvocationTable`, newest first.

`InvocationService` calls `newest`; the gateway shows the list.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import SeqNum
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.invocation_table import InvocationTable
from indilog_compute.invocations.records import application_of
from indilog_compute.invocations.states import InvocationState, state_of

LISTED_MAX: Final = 1_000
"""Largest number of invocations in one page."""
_AT_ONCE: Final = 5_000
"""Number of invocations that are examined before other tasks of the event loop run."""


class InvocationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One invocation in a list. Times are in seconds since 1970, by the log's time.

    Attributes:
        seqnum: the seqnum of the invocation's record; the next page is listed before it.
        due: time before which the invocation does not begin.
        tries: how often executors have begun to run the invocation.
        executor: the executor that runs the invocation now; None: no executor runs it.
        ended: when the invocation ended; None: it has not ended.
    """

    id: str
    function: str
    state: InvocationState
    seqnum: SeqNum
    due: float
    tries: int
    executor: str | None
    ended: float | None


class InvocationFilter(NamedTuple):
    """Selects the invocations to list. A field that is None selects all invocations; `before`
    selects the invocations with a smaller seqnum.
    """

    app: str | None = None
    function: str | None = None
    state: InvocationState | None = None
    before: SeqNum | None = None

    def has(self, invocation: RecordedInvocation) -> bool:
        """Whether this filter selects an invocation."""
        return (
            (self.before is None or invocation.seqnum < self.before)
            and self.function in {None, invocation.function}
            and self.app in {None, application_of(invocation.function)}
            and self.state in {None, state_of(invocation)}
        )


async def newest(
    table: InvocationTable,
    wanted: InvocationFilter,
    limit: int,
    give_way: Callable[[], Awaitable[None]],
) -> list[InvocationInfo]:
    """Return the newest selected invocations, newest first.

    Args:
        table: all invocations.
        wanted: selects invocations.
        limit: largest number of returned invocations.
        give_way: awaited after each `_AT_ONCE` invocations, so that other tasks run.
    """
    everything = table.all()
    found: list[RecordedInvocation] = []
    for start in range(0, len(everything), _AT_ONCE):
        part = filter(wanted.has, everything[start : start + _AT_ONCE])
        found = heapq.nlargest(limit, [*found, *part], key=_seqnum)
        await give_way()
    return [_info(invocation) for invocation in found]


def _seqnum(invocation: RecordedInvocation) -> SeqNum:
    return invocation.seqnum


def _info(invocation: RecordedInvocation) -> InvocationInfo:
    state = state_of(invocation)
    assert state is not None, "an invocation of the table has a state"
    return InvocationInfo(
        id=invocation.id,
        function=invocation.function,
        state=state,
        seqnum=invocation.seqnum,
        due=invocation.due,
        tries=invocation.tries,
        executor=invocation.executor,
        ended=invocation.ended_at if invocation.ended is not None else None,
    )
