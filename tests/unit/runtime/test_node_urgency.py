"""`NodeShell`: callers are answered before non-urgent events are handled, which never starve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from indilog.base.ids import Instant
from indilog.roles.role import Answer, Effect, Persisted, Received, Send, Started
from indilog.wire.messages import MetalogWanted
from tests.unit.runtime.scripted import PERSIST, A, B, RoleHost, Scripted, turns

pytestmark = pytest.mark.asyncio


def appending(
    appends: int, on_message: Callable[[Any], list[Effect]] = lambda _: []
) -> tuple[RoleHost, list[asyncio.Future[object]]]:
    """Return a host and its callers: A persists, answers and notifies B, which the story
    records.
    """
    answered: list[asyncio.Future[object]] = []
    unanswered = iter(answered)
    index = Send(B, MetalogWanted(0), urgent=False)

    def note(_: Received) -> list[Effect]:
        host.story.append("index")
        return []

    host = RoleHost(
        {
            A: Scripted(
                {
                    Started: lambda _: [PERSIST],
                    Persisted: lambda _: [Answer(next(unanswered), None), index],
                    Received: on_message,
                }
            ),
            B: Scripted({Received: note}),
        }
    )
    answered += [host.waiter(f"append {n}") for n in range(appends)]
    return host, answered


async def test_a_caller_is_answered_before_non_urgent_events_are_handled() -> None:
    host, (answered,) = appending(1)
    await turns()
    assert answered.done()
    assert host.story.index("answered append 0") < host.story.index("index")
    await host.shell.close()


async def test_a_write_caused_by_an_answer_precedes_non_urgent_events() -> None:
    """A link writes in the loop iteration after the one that completed the answer."""
    host, (answered,) = appending(1)
    loop = asyncio.get_running_loop()

    async def sends_on() -> None:
        await answered
        loop.call_soon(host.story.append, "written")

    sending = asyncio.create_task(sends_on())
    await turns()
    await sending
    assert host.story.index("written") < host.story.index("index")
    await host.shell.close()


async def test_non_urgent_events_are_handled_under_a_steady_stream_of_callers() -> None:
    host, answered = appending(40, lambda _: [PERSIST])
    for future in answered[:-1]:
        future.add_done_callback(lambda _: host.nudge())
    now = [1000.0]

    def later() -> Instant:
        now[0] += 0.001
        return Instant(now[0])

    host.shell.clock.now = later  # type: ignore[method-assign]
    await turns(100)
    assert all(future.done() for future in answered)
    assert host.story.index("index") < host.story.index("answered append 5")
    assert host.story.count("index") == len(answered)
    await host.shell.close()


async def test_a_call_other_than_an_append_ends_the_wait_of_non_urgent_events() -> None:
    host, answered = appending(40, lambda _: [PERSIST])
    for future in answered[:-1]:
        future.add_done_callback(lambda _: host.nudge())
    host.shell.clock.now = lambda: Instant(1000.0)  # type: ignore[method-assign]
    answered[9].add_done_callback(lambda _: host.shell.hasten(A))
    await turns(100)
    index = host.story.index("index")
    assert host.story.index("answered append 9") < index < host.story.index("answered append 11")
    assert host.story.count("index") == len(answered)
    await host.shell.close()


async def test_one_slow_sync_does_not_move_later_syncs_to_the_thread() -> None:
    host, (answered,) = appending(1)
    limit_s = host.shell._config.node.journal.sync_inline_s_max
    for seconds in (0.0001, 10.0):
        host.shell._synced_in(seconds)
    assert host.shell.sync_average_s < limit_s
    for _ in range(100):
        host.shell._synced_in(10.0)
    assert host.shell.sync_average_s > limit_s
    await turns()
    assert answered.done()
    await host.shell.close()
