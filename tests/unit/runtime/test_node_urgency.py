"""`NodeShell`: callers are answered before what is not urgent is handled, which never starves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from indilog.envelope import Envelope, envelope_encoded
from indilog.ids import Epoch, Instant, ViewNumber
from indilog.messages import MetalogWanted
from indilog.roles import (
    Answer,
    Effect,
    Event,
    FrameKind,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from tests.unit.runtime.test_node import AWAY, A, B, House, Scripted, Story, turns, waiter


def appends_one_after_the_other(
    story: Story, appends: int
) -> tuple[Scripted, Scripted, list[asyncio.Future[object]]]:
    """A role that persists, answers and tells a second one, which notes what it is told."""
    told = [waiter(story, f"append {n}") for n in range(appends)]
    unanswered = iter(told)

    def first(event: Event) -> list[Effect]:
        match event:
            case Persisted():
                return [Answer(next(unanswered), None), Send(B, MetalogWanted(0), urgent=False)]
            case _:
                return []

    def second(event: Event) -> list[Effect]:
        if isinstance(event, Received):
            story.events.append("index")
        return []

    return Scripted(first), Scripted(second), told


@pytest.mark.asyncio
async def test_a_caller_is_answered_before_what_is_not_urgent_is_handled() -> None:
    story = Story()
    first, second, told = appends_one_after_the_other(story, 1)
    house = House({A: first, B: second})
    house.story.events = story.events
    first._script = _persisting_when_started(first._script)
    await turns()
    assert told[0].done()
    assert story.events.index("told append 0") < story.events.index("index")
    await house.shell.close()


@pytest.mark.asyncio
async def test_what_an_answer_leads_to_is_written_before_what_is_not_urgent_is_handled() -> None:
    """A link writes in the turn of the loop after the one in which it was given the answer."""
    story = Story()
    first, second, told = appends_one_after_the_other(story, 1)
    house = House({A: first, B: second})
    house.story.events = story.events
    first._script = _persisting_when_started(first._script)
    loop = asyncio.get_running_loop()

    async def sends_on() -> None:
        await told[0]
        loop.call_soon(story.events.append, "written")

    sending = asyncio.create_task(sends_on())
    await turns()
    await sending
    assert story.events.index("written") < story.events.index("index")
    await house.shell.close()


@pytest.mark.asyncio
async def test_what_is_not_urgent_is_handled_while_callers_keep_coming() -> None:
    story = Story()
    first, second, told = appends_one_after_the_other(story, 40)
    house = House({A: first, B: second})
    house.story.events = story.events
    inner = first._script

    def busy(event: Event) -> list[Effect]:
        if isinstance(event, Received):
            return [Persist(FrameKind.METALOG, b"entry", 1)]
        return inner(event)

    first._script = _persisting_when_started(busy)
    call = envelope_encoded(Envelope(1, ViewNumber(1), Epoch(1), AWAY, A, (MetalogWanted(0),)))
    for future in told[:-1]:
        future.add_done_callback(lambda _: house.transport.on_frames([call]))
    now = [1000.0]

    def later() -> Instant:
        now[0] += 0.0004
        return Instant(now[0])

    house.shell.clock.now = later  # type: ignore[method-assign]
    await turns(100)
    assert all(future.done() for future in told)
    assert story.events.index("index") < story.events.index("told append 5")
    assert story.events.count("index") == len(told)
    await house.shell.close()


def _persisting_when_started(
    script: Callable[[Event], list[Effect]],
) -> Callable[[Event], list[Effect]]:
    def begin(event: Event) -> list[Effect]:
        if isinstance(event, Started):
            return [Persist(FrameKind.METALOG, b"entry", 0)]
        return script(event)

    return begin
