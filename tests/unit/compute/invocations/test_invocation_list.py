"""The list of recorded invocations: newest first, filtered, in pages."""

from __future__ import annotations

import pytest

from indilog_compute.invocations import invocation_list
from indilog_compute.invocations.invocation_list import InvocationFilter, newest
from indilog_compute.invocations.records import Failure, InvocationEnded
from indilog_compute.invocations.states import InvocationState
from tests.unit.compute.invocations.test_invocation_table import A, Story

pytestmark = pytest.mark.asyncio


def story() -> Story:
    """Seven invocations: i0 and i3 have ended, one of them with a failure."""
    made = Story()
    for number in range(7):
        made.accept(f"i{number}", due=made.time + 50 if number == 6 else 0)
    made(InvocationEnded(A, "i0", 0, b"1", None), after_s=5)
    made(InvocationEnded(A, "i3", 0, None, Failure("KeyError", "x", {})))
    return made


async def give_way() -> None: ...


@pytest.mark.parametrize("at_once", [1, 3, 5_000])
async def test_open_and_ended_invocations_are_one_list(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(invocation_list, "_AT_ONCE", at_once)
    table = story().table

    async def ids(wanted: InvocationFilter, limit: int = 100) -> list[str]:
        return [found.id for found in await newest(table, wanted, limit, give_way)]

    assert await ids(InvocationFilter()) == ["i6", "i5", "i4", "i3", "i2", "i1", "i0"]
    first = await newest(table, InvocationFilter(), 3, give_way)
    assert await ids(InvocationFilter(before=first[-1].seqnum), 3) == ["i3", "i2", "i1"]
    assert await ids(InvocationFilter(state=InvocationState.SCHEDULED)) == ["i6"]
    assert await ids(InvocationFilter(state=InvocationState.FAILED)) == ["i3"]
    assert await ids(InvocationFilter(state=InvocationState.RUNNING), 2) == ["i5", "i4"]
    function = first[0].function
    app = function.partition(".")[0]
    assert len(await ids(InvocationFilter(app=app, function=function))) == 7
    assert (
        await ids(InvocationFilter(app=app + "x"))
        == await ids(InvocationFilter(function="x.y"))
        == []
    )


async def test_an_ended_invocation_says_when_and_an_open_one_who_runs_it() -> None:
    made = story()
    found = {info.id: info for info in await newest(made.table, InvocationFilter(), 100, give_way)}
    assert (found["i0"].ended, found["i0"].executor, found["i0"].tries) == (1005.0, None, 1)
    assert (found["i1"].ended, found["i1"].executor) == (None, A)
    assert (found["i6"].executor, found["i6"].due) == (None, 1050.0)
