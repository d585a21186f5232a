"""`NodeShell`: no answer leaves the process before the sync; faults end it; deadlines are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
import structlog.testing

from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Answer,
    AnswerAppends,
    Effect,
    Event,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.wire.envelope import WIRE_VERSION
from indilog.wire.messages import MetalogWanted
from indilog.wire.sequencer_messages import MetalogAppend
from tests.unit.runtime.scripted import (
    AWAY,
    PERSIST,
    A,
    B,
    PassiveRole,
    RoleHost,
    Script,
    Scripted,
    frame_to,
    turns,
    with_held_sync,
)

pytestmark = pytest.mark.asyncio

BACKUP = NodeId("sequencer-1")
PROMISES_NOTHING = MetalogAppend(Epoch(1), 0, Epoch(0), (), 0)


async def test_answers_and_messages_leave_after_the_sync_of_earlier_writes() -> None:
    messages = [Send(AWAY, MetalogWanted(0)), Send(AWAY, MetalogWanted(1))]
    host = RoleHost(
        {
            A: Scripted(
                {
                    Started: lambda _: [PERSIST],
                    Persisted: lambda _: [AnswerAppends([answered], 5, 1), *messages],
                }
            )
        }
    )
    answered = host.waiter("caller")
    assert await asyncio.wait_for(answered, 60) == (5, 1)
    await turns()
    assert host.story[:2] == ["write b'entry'", "sync"]
    assert sorted(host.story[2:]) == ["answered caller", "send 2 to engine-0"]
    await host.shell.close()


async def test_without_syncs_answers_leave_after_the_flush_to_the_page_cache() -> None:
    """D6: otherwise an acknowledged frame is lost with the process."""
    host = RoleHost(
        {
            A: Scripted(
                {Received: lambda _: [PERSIST], Persisted: lambda _: [Answer(answered, None)]}
            )
        }
    )
    answered = host.waiter("caller")
    host.journal.syncs = False
    await turns()
    host.story.clear()
    host.nudge()
    await asyncio.wait_for(answered, 60)
    assert host.story == ["write b'entry'", "flush", "answered caller"]
    await host.shell.close()


async def test_a_message_that_promises_nothing_leaves_before_the_sync() -> None:
    messages = [Send(AWAY, MetalogWanted(0)), Send(BACKUP, PROMISES_NOTHING)]
    host = RoleHost({A: Scripted({Started: lambda _: [PERSIST, *messages]})})
    await turns()
    assert host.story == [
        "write b'entry'",
        "send 1 to sequencer-1",
        "sync",
        "send 1 to engine-0",
    ]
    await host.shell.close()


async def test_a_message_that_promises_nothing_leaves_during_a_slow_sync() -> None:
    host = with_held_sync(
        {
            Started: lambda _: [PERSIST, Send(BACKUP, PROMISES_NOTHING)],
            Received: lambda _: [Send(BACKUP, PROMISES_NOTHING), Send(AWAY, MetalogWanted(0))],
        }
    )
    await turns()
    host.nudge()
    await turns()
    early = ["write b'entry'", "send 1 to sequencer-1", "send 1 to sequencer-1"]
    assert (host.shell.holding, host.story) == (True, early)
    host.journal.gate.set()
    await asyncio.wait_for(host.shell.wait_until_synced(), 60)
    await turns()
    assert host.story == [*early, "sync", "send 1 to engine-0"]
    await host.shell.close()


async def test_messages_between_roles_of_a_process_arrive_in_the_same_iteration_by_reference() -> (
    None
):
    message = MetalogWanted(7)
    receiver = Scripted()
    host = RoleHost({A: Scripted({Started: lambda _: [Send(B, message)]}), B: receiver})
    await turns()
    (heard,) = [e for e in receiver.heard if isinstance(e, Received)]
    assert heard.message is message
    assert heard.incarnation == Epoch(1), "that of the process"
    assert host.story == []
    await host.shell.close()


async def test_during_a_slow_sync_the_loop_runs_and_holds_its_output() -> None:
    host = with_held_sync(
        {
            Started: lambda _: [PERSIST],
            Persisted: lambda _: [Answer(first, None)],
            Received: lambda _: [Answer(second, None)],
        }
    )
    first, second = host.waiter("first"), host.waiter("second")
    await turns()
    host.nudge()
    await turns()
    assert host.shell.holding
    assert not first.done()
    assert not second.done()
    host.journal.gate.set()
    await asyncio.wait_for(asyncio.gather(first, second), 60)
    assert host.story == ["write b'entry'", "sync", "answered first", "answered second"]
    await host.shell.close()


async def test_a_failed_sync_ends_the_shell_and_nothing_leaves() -> None:
    message = Send(AWAY, MetalogWanted(0))
    host = RoleHost(
        {
            A: Scripted(
                {
                    Started: lambda _: [PERSIST],
                    Persisted: lambda _: [
                        AnswerAppends([None, appended], 5, 1),
                        Answer(read, 7),
                        message,
                    ],
                }
            )
        }
    )
    host.journal.error = OSError(5, "EIO")
    appended, read = (asyncio.get_running_loop().create_future() for _ in range(2))
    # The entry may be on the disk, and recovery would find it: a retry could append it twice.
    with pytest.raises(AppendOutcomeUnknownError, match="EIO"):
        await asyncio.wait_for(appended, 60)
    with pytest.raises(NotReadyError, match="EIO"):
        await asyncio.wait_for(read, 60)
    assert host.fatal == [host.journal.error]
    assert host.story == ["write b'entry'"]
    await host.shell.close()


async def test_an_unknown_outcome_stays_unknown_when_the_sync_fails() -> None:
    unknown = AppendOutcomeUnknownError("another writer has the shard")
    host = RoleHost(
        {
            A: Scripted(
                {
                    Started: lambda _: [PERSIST],
                    Persisted: lambda _: [Answer(answered, unknown)],
                }
            )
        }
    )
    host.journal.error = OSError(5, "EIO")
    answered = host.waiter("caller")
    with pytest.raises(AppendOutcomeUnknownError, match="another writer"):
        await asyncio.wait_for(answered, 60)
    await host.shell.close()


def broken(event: Event) -> list[Effect]:
    raise AssertionError("cuts only grow")


async def test_a_role_that_breaks_an_invariant_ends_the_shell() -> None:
    host = RoleHost({A: Scripted({Started: broken})})
    await turns()
    assert [str(error) for error in host.fatal] == ["cuts only grow"]
    assert isinstance(host.shell.failed, AssertionError)
    await host.shell.close()


async def test_a_role_is_called_at_its_deadline_without_events() -> None:
    role = Scripted()
    host = RoleHost({A: role})
    called = asyncio.Event()

    def handle(events: Sequence[Event], now: Instant) -> list[Effect]:
        if events:
            role.due = Instant(now + 0.01)
        else:
            role.due = None
            called.set()
        return []

    role.handle = handle  # type: ignore[method-assign]
    await asyncio.wait_for(called.wait(), 60)
    await host.shell.close()


async def test_components_that_request_another_iteration_share_a_timer() -> None:
    """Otherwise each iteration adds a timer, and each timer an iteration, without end."""
    host = RoleHost({A: Scripted()})
    loop, shell = asyncio.get_running_loop(), host.shell
    shell._watch_idle = lambda: shell._wake_after(0.001)  # type: ignore[method-assign]
    for _ in range(20):
        host.nudge()
        await turns()
    timers = [one for one in loop._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
    assert [one._callback for one in timers].count(shell._on_timer) == 1
    await host.shell.close()


async def test_the_earliest_requested_iteration_sets_the_timer() -> None:
    host = RoleHost({A: Scripted()})
    await turns()
    turned = asyncio.Event()
    host.shell._wake_after(3600.0)
    host.shell._wake_after(0.001)
    host.shell._wake_after(3600.0)
    host.shell._watch_idle = turned.set  # type: ignore[method-assign]
    await asyncio.wait_for(turned.wait(), 60)
    await host.shell.close()


async def test_a_promise_to_a_role_of_the_process_waits_for_the_sync() -> None:
    """Decision 0050: otherwise an entry could rest on a batch that this disk loses."""
    script: Script = {Started: lambda _: [PERSIST, Send(B, MetalogWanted(3))]}
    receiver = Scripted({Received: lambda _: [Send(AWAY, MetalogWanted(4))]})
    host = RoleHost({A: Scripted(script), B: receiver})
    await turns()
    assert host.story == ["write b'entry'", "sync", "send 1 to engine-0"]
    await host.shell.close()


async def test_a_promise_to_a_role_of_the_process_waits_for_a_sync_in_the_thread() -> None:
    script: Script = {Received: lambda _: [PERSIST, Send(B, MetalogWanted(3))]}
    received = asyncio.Event()

    def note(_: Received) -> list[Effect]:
        received.set()
        return []

    receiver = Scripted({Received: note})
    host = RoleHost({A: Scripted(script), B: receiver}, sync_inline_s_max=0.0)
    await turns()
    host.journal.gate.clear()
    host.nudge()
    await turns(20)
    assert not received.is_set()
    host.journal.gate.set()
    await asyncio.wait_for(received.wait(), 60)
    await host.shell.close()


async def test_what_promises_nothing_reaches_roles_of_the_process_before_the_sync() -> None:
    script: Script = {Started: lambda _: [PERSIST, Send(B, PROMISES_NOTHING)]}
    receiver = Scripted({Received: lambda _: [Send(BACKUP, PROMISES_NOTHING)]})
    host = RoleHost({A: Scripted(script), B: receiver})
    await turns()
    assert host.story == ["write b'entry'", "send 1 to sequencer-1", "sync"]
    await host.shell.close()


async def test_a_role_that_does_not_persist_answers_and_sends_before_the_sync() -> None:
    script: Script = {Started: lambda _: [Answer(answered, None), Send(BACKUP, MetalogWanted(3))]}
    host = RoleHost({A: Scripted({Started: lambda _: [PERSIST]}), AWAY: PassiveRole(script)})
    answered = host.waiter("caller")
    await turns()
    assert host.story == ["write b'entry'", "send 1 to sequencer-1", "sync", "answered caller"]
    await host.shell.close()


async def test_a_process_with_all_nodes_passes_promises_at_once() -> None:
    """Its roles are lost together: one sync covers batch, report and entry."""
    script: Script = {Started: lambda _: [PERSIST, Send(B, MetalogWanted(3))]}
    receiver = Scripted({Received: lambda _: [PERSIST]})
    others = {node: Scripted() for node in view_of().nodes if node not in (A, B)}
    host = RoleHost({A: Scripted(script), B: receiver, **others})
    await turns()
    assert host.story == ["write b'entry'", "write b'entry'", "sync"]
    await host.shell.close()


async def test_non_urgent_events_wait_for_a_sync_without_a_busy_loop() -> None:
    message = PROMISES_NOTHING
    script: Script = {
        Started: lambda _: [PERSIST],
        Received: lambda _: [Answer(answered, None), Send(B, message, urgent=False)],
    }
    receiver = Scripted()
    host = RoleHost({A: Scripted(script), B: receiver}, sync_inline_s_max=0.0)
    answered = host.waiter("caller")
    host.journal.gate.clear()
    taken: list[None] = []
    turn = host.shell._iterate

    def counted() -> None:
        taken.append(None)
        turn()

    host.shell._iterate = counted  # type: ignore[method-assign]
    await turns()
    host.nudge()
    await turns(2)
    assert host.shell._held
    assert host.shell._later
    before = len(taken)
    await turns(300)
    assert len(taken) - before < 30
    host.journal.gate.set()
    await asyncio.wait_for(answered, 60)
    await turns()
    assert [e.message for e in receiver.heard if isinstance(e, Received)] == [message]
    await host.shell.close()


async def test_frames_for_other_nodes_or_incarnations_are_counted_and_dropped() -> None:
    role = Scripted()
    host = RoleHost({A: role})
    await turns()
    host.transport.on_frames(
        [
            b"junk",
            frame_to(B),
            frame_to(A, epoch=2),
            frame_to(A),
        ]
    )
    await turns()
    assert [e for e in role.heard if isinstance(e, Received)] == [
        Received(AWAY, MetalogWanted(0), Epoch(2))
    ]
    assert sum(host.shell.metrics.ignored.values()) == 3
    assert host.shell.metrics.ignored["frame of an old incarnation"] == 1
    assert host.shell.metrics.received == {"MetalogWanted": 1}
    await host.shell.close()


async def test_what_another_release_sends_is_counted_and_logged() -> None:
    later = msgspec.msgpack.encode([WIRE_VERSION + 1, 1, AWAY, A, []])
    unknown = msgspec.msgpack.encode([WIRE_VERSION, 1, AWAY, A, [["Greeting"]]])
    host = RoleHost({A: Scripted()})
    await turns()
    with structlog.testing.capture_logs() as logs:
        host.transport.on_frames([later, unknown])
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["a frame of another node cannot be read"]
    assert f"wire version {WIRE_VERSION + 1}" in warnings[0]["reason"]
    assert host.shell.metrics.ignored == {"malformed frame": 1, "message of an unknown kind": 1}
    await host.shell.close()


async def test_closing_syncs_written_frames() -> None:
    host = RoleHost({A: Scripted({Started: lambda _: [PERSIST]})})
    await turns()
    await host.shell.close()
    assert host.story == ["write b'entry'", "sync"]


async def test_an_idle_process_notes_the_synced_position_of_its_journal() -> None:
    """D11: once, after a while without writes."""
    host = RoleHost({A: Scripted({Received: lambda _: [PERSIST]})}, journal_idle_s=0.001)
    for _ in range(2):
        host.nudge()
        await asyncio.wait_for(host.journal.settled.wait(), 60)
        host.journal.settled.clear()
    assert [what for what in host.story if what != "sync"] == ["write b'entry'", "settle"] * 2
    await host.shell.close()


def persist_and_answer(answered: list[asyncio.Future[object]]) -> Script:
    """Persist at the start and at a message, and answer each time."""
    return {
        Started: lambda _: [PERSIST],
        Received: lambda _: [Persist(FrameKind.METALOG, b"second", 2)],
        Persisted: lambda persisted: [Answer(answered[persisted.token - 1], None)],
    }


async def test_settling_during_a_sync_waits_for_frames_written_meanwhile() -> None:
    answered: list[asyncio.Future[object]] = []
    host = with_held_sync(persist_and_answer(answered))
    answered += [host.waiter("first"), host.waiter("second")]
    await turns()
    host.nudge()
    await turns()
    settled = asyncio.ensure_future(host.shell.wait_until_synced())
    settled.add_done_callback(lambda _: host.story.append("settled"))
    host.journal.gate.set()
    await asyncio.wait_for(settled, 60)
    await turns()
    end = host.story.index("settled")
    assert end > host.story.index("write b'second'")
    assert host.story[:end].count("sync") == 2
    await host.shell.close()


async def test_a_failed_sync_in_the_thread_fails_all_callers_and_lets_the_shell_close() -> None:
    answered: list[asyncio.Future[object]] = []
    host = with_held_sync(persist_and_answer(answered))
    answered += [host.waiter("first"), host.waiter("second")]
    host.journal.error = OSError(5, "EIO")
    await turns()
    settled = asyncio.ensure_future(host.shell.wait_until_synced())
    host.journal.gate.set()
    with pytest.raises(NotReadyError, match="EIO"):
        await asyncio.wait_for(answered[0], 60)
    await asyncio.wait_for(settled, 60)
    await asyncio.wait_for(host.shell.close(), 60)
    assert len(host.fatal) == 1
    with pytest.raises(NotReadyError, match="stopped"):
        host.shell.wake(A)


async def test_a_sync_that_fails_after_the_shell_failed_fails_its_callers() -> None:
    host = with_held_sync(
        {
            Started: lambda _: [PERSIST],
            Persisted: lambda _: [AnswerAppends([answered], 5, 1)],
            Received: broken,
        }
    )
    answered = host.waiter("caller")
    host.journal.error = OSError(5, "EIO")
    await turns()
    host.nudge()
    await turns()
    assert isinstance(host.shell.failed, AssertionError)
    host.journal.gate.set()
    with pytest.raises(AppendOutcomeUnknownError, match="EIO"):
        await asyncio.wait_for(answered, 60)
    assert len(host.fatal) == 1
    await host.shell.close()


async def test_disk_damage_reported_by_a_role_is_counted_and_logged() -> None:
    damage = Ignore(Location(1, 32, 5), "a record batch on disk is damaged")
    with structlog.testing.capture_logs() as logs:
        host = RoleHost({A: Scripted({Started: lambda _: [damage]})})
        await turns()
    assert host.shell.metrics.damaged == 1
    assert [(e["log_level"], e["segment"]) for e in logs if "damaged" in e["event"]] == [
        ("error", 1)
    ]
    await host.shell.close()
