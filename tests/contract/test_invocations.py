"""The invocation service, over a log and without workers: every recorded invocation runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from indilog.base.deployed import ScheduleSpec
from indilog.base.errors import (
    CallOutcomeUnknownError,
    DataLossError,
    InvalidArgumentsError,
    NotReadyError,
    OverloadedError,
    UnknownFunctionError,
    WorkerCrashedError,
)
from indilog.base.log import Record
from indilog.config import KIB, ClusterConfig, NodeConfig, node_config
from indilog.link.link_messages import Failed, Returned, failed
from indilog.testing import MemoryLogs
from indilog.testing.memory_log import MemoryLog
from indilog_compute.invocations.checkpoint import checkpoint_parts
from indilog_compute.invocations.records import InvocationEnded, encode
from indilog_compute.invocations.scheduling import DeployedSchedule
from indilog_compute.invocations.service import InvocationService
from indilog_compute.invocations.states import InvocationState
from indilog_compute.workers.call import Call
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio
FAST: dict[str, Any] = {
    "invocation_lease_s": 0.3,
    "invocation_retry_s_min": 0.01,
    "invocation_retry_s_max": 0.02,
    "invocation_tries_max": 3,
    "app_invocations_open_share_max": 1.0,
    "app_kept_share_max": 1.0,  # all calls of these tests are of one application
}


class Node:
    """Replaces the workers: a call ends with the next outcome, or not at all."""

    def __init__(self, *outcomes: Returned | Failed) -> None:
        self.outcomes = list(outcomes)
        self.begun: Counter[str] = Counter()
        self.stopped: list[str] = []
        self.calls: list[Call] = []
        self.begins = asyncio.Event()

    def start(
        self, name: str, arguments: bytes, *, position: int, depth: int, invocation: str
    ) -> Call:
        self.begun[invocation] += 1
        self.begins.set()
        outcome: asyncio.Future[Returned | Failed] = asyncio.get_running_loop().create_future()
        if self.outcomes:
            outcome.set_result(self.outcomes.pop(0))
        call: Any = SimpleNamespace(outcome=outcome, invocation=invocation)
        self.calls.append(call)
        return call  # type: ignore[no-any-return]

    def stop(self, call: Call) -> None:
        self.stopped.append(call.invocation)


def service_of(
    logs: MemoryLogs, config: NodeConfig, node: Node, name: str, rank: int = 0
) -> InvocationService:
    return InvocationService(
        logs,
        config,
        node=name,
        rank=lambda: rank,
        record_bytes_max=logs.config.record_bytes_max,
        start=node.start,
        stop=node.stop,
    )


@asynccontextmanager
async def running(
    logs: MemoryLogs, node: Node, name: str = "a", rank: int = 0, **settings: float
) -> AsyncIterator[InvocationService]:
    config = node_config(**{**FAST, **settings})
    service = service_of(logs, config, node, name, rank)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def crashed() -> Failed:
    return failed(WorkerCrashedError("The worker process died."))


async def test_an_accepted_invocation_runs_and_its_outcome_is_readable() -> None:
    node = Node(Returned(5, b"[1]"))
    async with running(MemoryLogs(), node) as service:
        id_ = await service.accept("app.f", b"{}")
        status = await service.status_of(id_, wait_s=30)
        assert status is not None
        assert (status.function, status.state) == ("app.f", InvocationState.DONE)
        assert status.outcome == Returned(5, b"[1]")
        assert await service.status_of("nothing") is None


async def test_an_outcome_survives_a_restart_and_is_readable_on_every_node() -> None:
    logs = MemoryLogs()
    async with running(logs, Node(failed(ValueError("No.")))) as service:
        id_ = await service.accept("app.f", b"{}")
        assert await service.status_of(id_, wait_s=30) is not None
    async with running(logs, Node()) as again, running(logs, Node(), "b") as other:
        for there in (again, other):
            status = await there.status_of(id_)
            assert status is not None
            assert (status.state, status.outcome) == (
                InvocationState.FAILED,
                failed(ValueError("No.")),
            )


async def test_a_timer_survives_a_restart() -> None:
    logs, node = MemoryLogs(), Node(Returned(0, b"1"))
    async with running(logs, Node()) as service:
        id_ = await service.accept("app.f", b"{}", delay_s=2.0)
        status = await service.status_of(id_)
        assert status is not None
        assert status.state == InvocationState.SCHEDULED
    async with running(logs, node) as again:
        status = await again.status_of(id_, wait_s=30)
        assert status is not None
        assert status.state == InvocationState.DONE
    assert node.begun == {id_: 1}


async def test_the_runs_of_a_crashed_node_are_taken_over_by_another_node() -> None:
    """A crashed node writes no heartbeat; another node takes over its runs one lease later."""
    logs, gone, other = MemoryLogs(), Node(), Node(Returned(0, b'"other"'))
    config = node_config(**FAST)
    vanished = service_of(logs, config, gone, "a")
    await vanished.start()
    id_ = await vanished.accept("app.f", b"{}")
    await gone.begins.wait()
    for task in [*vanished._tasks, *vanished._runs._running.values()]:
        task.cancel()  # like kill -9: no record is appended
    async with running(logs, other, "b") as there:
        assert await there.outcome(id_) == Returned(0, b'"other"')
    assert other.begun == {id_: 1}


async def test_a_run_with_a_live_lease_is_not_started_by_another_node() -> None:
    logs, slow, other = MemoryLogs(), Node(), Node()
    async with running(logs, slow) as one, running(logs, other, "b") as two:
        id_ = await one.accept("app.f", b"{}")
        await slow.begins.wait()
        bound = 0
        for _ in range(9):  # three leases, by the executor's heartbeats
            alive = await logs.log("$invocations").read_next("executors", bound, wait=30)
            assert alive is not None
            bound = alive.seqnum + 1
        assert other.begun == {}
        status = await two.status_of(id_)
        assert status is not None
        assert status.state == InvocationState.RUNNING


async def test_a_call_whose_worker_crashes_is_retried_and_finally_fails() -> None:
    node = Node(crashed(), crashed(), Returned(0, b"1"))
    async with running(MemoryLogs(), node) as service:
        id_ = await service.accept("app.f", b"{}")
        assert await service.outcome(id_) == Returned(0, b"1")
    node = Node(crashed(), crashed(), crashed(), Returned(0, b"never"))
    async with running(MemoryLogs(), node) as service:
        id_ = await service.accept("app.f", b"{}")
        outcome = await service.outcome(id_)
        assert isinstance(outcome, Failed)
        assert "app.f was begun 3 times, and each time" in outcome.message
    assert node.begun == {id_: 3}


async def test_a_call_that_could_not_begin_stays_open() -> None:
    node = Node(failed(OverloadedError("Full.")), failed(NotReadyError("No.")), Returned(0, b"1"))
    async with running(MemoryLogs(), node) as service:
        id_ = await service.accept("app.f", b"{}")
        assert await service.outcome(id_) == Returned(0, b"1")


async def test_a_repeated_key_is_one_run_with_one_result() -> None:
    logs, node, other = MemoryLogs(), Node(), Node()
    async with running(logs, node) as one, running(logs, other, "b") as two:
        ids = await asyncio.gather(*(
            service.accept("app.f", arguments, key="k")
            for service in (one, two, one, two)
            for arguments in (b'{"a":1,"b":2}', b'{"b": 2, "a": 1}')
        ))  # fmt: skip
        assert len(set(ids)) == 1
        await asyncio.wait({asyncio.ensure_future(n.begins.wait()) for n in (node, other)},
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert node.begun + other.begun == {ids[0]: 1}
        with pytest.raises(InvalidArgumentsError, match="was used with other arguments"):
            await two.accept("app.f", b'{"a":2}', key="k")
        assert await two.accept("app.g", b'{"a":2}', key="k") != ids[0]


async def test_a_key_survives_a_restart() -> None:
    logs = MemoryLogs()
    async with running(logs, Node(Returned(0, msgspec.json.encode("once")))) as service:
        id_ = await service.accept("app.f", b"{}", key="k")
        await service.outcome(id_)
    node = Node()
    async with running(logs, node) as again:
        assert await again.accept("app.f", b"{}", key="k") == id_
        assert await again.outcome(id_) == Returned(0, b'"once"')
    assert not node.begun


async def test_invocations_over_the_open_limit_are_refused() -> None:
    async with running(MemoryLogs(), Node(), invocations_open_max=2) as service:
        for _ in range(2):
            await service.accept("app.f", b"{}", delay_s=100)
        await service.status_of("x")
        with pytest.raises(OverloadedError, match="2 recorded invocations wait or run"):
            await service.accept("app.f", b"{}")


async def test_one_application_cannot_open_all_invocations_at_once() -> None:
    """Calls whose records are being appended at the same time count, too."""
    async with running(
        MemoryLogs(), Node(), invocations_open_max=10, app_invocations_open_share_max=0.5
    ) as service:
        accepting = [service.accept("slow.nap", b"{}", delay_s=900) for _ in range(10)]
        answers = await asyncio.gather(*accepting, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
        assert len(refused) == 5
        assert "5 recorded invocations of app slow wait or run" in str(refused[0])
        assert await service.accept("other.f", b"{}", delay_s=900)
        await service.status_of("x")  # until all records are read
        with pytest.raises(OverloadedError, match="5 recorded invocations of app slow"):
            await service.accept("slow.nap", b"{}")


async def test_a_call_with_a_key_that_is_refused_is_not_recorded() -> None:
    """No caller could wait for its record: there is room for one caller, and nothing is read."""
    logs, node = MemoryLogs(), Node(*[Returned(0, b"1")] * 3)
    async with running(logs, node, calls_pending_max=1) as service:
        service._tasks[0].cancel()
        first = asyncio.ensure_future(service.accept("app.f", b"{}", key="first"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 callers wait for records"):
            await service.accept("app.f", b"{}", key="second")
        assert len(await logs.log("$invocations").read_range()) == 1
        service._tasks[0] = asyncio.ensure_future(service._follow())
        again = [await first]
        again += [await service.accept("app.f", b"{}", key=key) for key in ("first", "second")]
        assert again[0] == again[1] != again[2]
        for id_ in again:
            assert await service.outcome(id_) == Returned(0, b"1")
    assert sorted(node.begun.values()) == [1, 1]


async def test_a_key_is_checked_against_the_whole_log_also_on_a_lagging_node() -> None:
    logs = MemoryLogs()
    async with running(logs, Node()) as one, running(logs, Node(), "b") as two:
        two._tasks[0].cancel()
        id_ = await one.accept("app.f", b"{}", key="k")
        asked = asyncio.ensure_future(two.known_by_now("app.f", b"{}", "k"))
        await asyncio.sleep(0)
        assert (one.known("app.f", b"{}", "k"), two.known("app.f", b"{}", "k")) == (id_, None)
        two._tasks[0] = asyncio.ensure_future(two._follow())
        assert await asked == two.known("app.f", b"{}", "k") == id_
        assert await two.known_by_now("app.f", b"{}", "other") is None
        assert await two.known_by_now("app.f", b"{}", "") is None
        with pytest.raises(InvalidArgumentsError, match="was used with other arguments"):
            two.known("app.f", b'{"n":1}', "k")
        two._broken = DataLossError("Lost.")
        with pytest.raises(NotReadyError, match=r"not run here: Lost\."):
            await two.known_by_now("app.f", b"{}", "other")


@pytest.mark.parametrize("arguments", [b"{", b'{"\xff":1}', b"[" * 100_000 + b"]" * 100_000])
async def test_arguments_that_are_no_json_differ_from_the_arguments_of_a_key(
    arguments: bytes,
) -> None:
    async with running(MemoryLogs(), Node()) as service:
        await service.accept("app.f", b"{}", key="k")
        with pytest.raises(InvalidArgumentsError, match="was used with other arguments"):
            service.known("app.f", arguments, "k")


async def test_a_malformed_key_is_refused() -> None:
    async with running(MemoryLogs(), Node()) as service:
        for key in ("x" * 256, "a\nb"):
            with pytest.raises(InvalidArgumentsError, match="1 to 255 printable characters"):
                await service.accept("app.f", b"{}", key=key)


async def test_a_run_interrupted_by_a_platform_stop_runs_again_after_the_restart() -> None:
    logs, node, again = MemoryLogs(), Node(), Node(Returned(0, b"1"))
    async with running(logs, node) as service:
        id_ = await service.accept("app.f", b"{}")
        await node.begins.wait()
        assert [call.outcome.cancelled() for call in node.calls] == [False]
    assert node.stopped == [id_]
    assert [call.outcome.cancelled() for call in node.calls] == [False], (
        "the router cancels the calls"
    )
    async with running(logs, again) as later:
        assert await later.outcome(id_) == Returned(0, b"1")


async def run_many(service: InvocationService, times: int = 15) -> str:
    """Run enough invocations for a checkpoint to be written; return the last one's id."""
    ids: list[str] = []
    for _ in range(times):
        ids = await asyncio.gather(*(service.accept("app.f", b"{}") for _ in range(60)))
        await asyncio.gather(*(service.outcome(id_) for id_ in ids))
    return ids[-1]


async def test_unneeded_records_are_trimmed_and_a_late_reader_reaches_the_same_state() -> None:
    """A timer delays only the trim of its own stream; a record dropped as a repetition stays
    dropped.
    """
    logs, node = MemoryLogs(), Node(*[Returned(0, b"1")] * 1500)
    async with running(logs, node, results_kept_max=100) as service:
        timer = await service.accept("app.f", b"{}", delay_s=30 * 86_400)
        keyed = await service.accept("app.f", b"{}", key="k")
        last = await run_many(service)
        left = logs.log("$invocations")
        assert len(await left.read_range(limit=10_000)) < 1500
    async with running(logs, Node(), results_kept_max=100) as late:
        assert await late.accept("app.f", b"{}", key="k") == keyed
        status = [await late.status_of(id_) for id_ in (timer, keyed, last)]
        assert [t.state if t else None for t in status] == ["scheduled", "done", "done"]
        assert late.status()["open"] == 1


async def test_a_node_paused_during_trims_resumes_from_the_checkpoint_of_other_nodes() -> None:
    logs, other = MemoryLogs(), Node(*[Returned(0, b"1")] * 2000)
    async with running(logs, Node(), "paused", results_kept_max=100) as paused:
        paused._tasks[0].cancel()  # it stops reading
        async with running(logs, other, "b", results_kept_max=100) as service:
            last = await run_many(service)
            paused._tasks[0] = asyncio.ensure_future(paused._follow())
            status = await paused.status_of(last)
            assert status is not None
            assert status.state == InvocationState.DONE
            assert paused._table.checkpoint().count == service._table.checkpoint().count


async def test_a_partitioned_node_writes_no_checkpoint_over_a_gap() -> None:
    """The node reads the untrimmed records page by page. Before it reaches the checkpoint of the
    other nodes, it has read enough for a checkpoint of its own, which would let it trim theirs.
    """
    logs, other = MemoryLogs(), Node(*[Returned(0, b"1")] * 4000)
    async with (
        running(logs, Node(), "paused", results_kept_max=700) as paused,
        running(logs, other, "b", 1, results_kept_max=700) as service,
    ):
        last = await run_many(service, 5)
        paused._tasks[0].cancel()  # it stops reading
        while not service._table.checkpointed:
            last = await run_many(service, 5)
        assert service._table.checkpointed > 2000, "the second node wrote it"
        paused._tasks[0] = asyncio.ensure_future(paused._follow())
        status = await paused.status_of(last)
        assert status is not None
        assert status.state == InvocationState.DONE
        async with running(logs, Node(), "late", 2, results_kept_max=700) as late:
            for node in (late, paused, service):
                await node.status_of("nothing")  # reads up to the tail
                assert node._table.count == node._table.end, "the log has no other records"


async def test_a_node_starts_despite_a_lost_checkpoint_or_last_record() -> None:
    logs, node = DamagedLogs(), Node(*[Returned(0, b"1")] * 1500)
    async with running(logs, node, results_kept_max=100) as service:
        last = await run_many(service)
        [(checkpoint, _)] = await service._checkpoints._parts()
    tail = await MemoryLog("$invocations", logs=logs).read_prev()
    assert tail is not None
    logs.lost |= {checkpoint, tail.seqnum}
    async with running(logs, Node(Returned(0, b"2")), "b", results_kept_max=100) as late:
        assert await late.outcome(await late.accept("app.f", b"{}")) == Returned(0, b"2")
        with pytest.raises(DataLossError, match="Invocation nothing is not known"):
            await late.status_of("nothing")  # its record may be among the lost ones
    logs.lost.clear()
    logs.lost.add(checkpoint)
    async with running(logs, Node(), results_kept_max=100) as late:
        status = await late.status_of(last)
        assert status is not None
        assert status.state == InvocationState.DONE


async def test_a_checkpoint_with_a_lost_part_does_not_stop_a_partitioned_node() -> None:
    logs, other = DamagedLogs(), Node(*[Returned(0, b"1")] * 4000)
    logs.config = ClusterConfig(record_bytes_max=8 * KIB)
    async with (
        running(logs, Node(), "paused", results_kept_max=300) as paused,
        running(logs, other, "b", 1, results_kept_max=300) as service,
    ):
        paused._tasks[0].cancel()
        last = await run_many(service, 5)
        while not service._table.checkpointed:
            last = await run_many(service, 5)
        (lost, _), *others = await service._checkpoints._parts()
        assert others
        logs.lost.add(lost)
        paused._tasks[0] = asyncio.ensure_future(paused._follow())
        status = await paused.status_of(last)
        assert status is not None
        assert status.state == InvocationState.DONE


async def test_a_checkpoint_is_split_into_records_within_the_size_limit() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=8 * KIB))
    node = Node(*[Returned(0, b"1")] * 1500)
    async with running(logs, node, results_kept_max=200) as service:
        await run_many(service)
        assert service._table.checkpointed
        assert len(await service._checkpoints._parts()) > 1
    async with running(logs, Node(), results_kept_max=200) as late:
        await late.status_of("nothing")
        assert late._table.count == late._table.end


async def test_no_run_starts_before_the_records_after_a_checkpoint_are_read() -> None:
    """A node that resumes from a checkpoint would otherwise start completed runs again."""
    logs, node = MemoryLogs(), Node()
    async with running(logs, node) as service:
        id_ = await service.accept("app.f", b"{}")
        await node.begins.wait()
        parts = checkpoint_parts(service._table.checkpoint(), "earlier")
        [runs] = service._table.open.values()
        ended = encode(InvocationEnded(service._executor.name, id_, 0, b"1"))
        await service._log.append(ended, tags=[runs.stream])
        assert await service.outcome(id_) == Returned(0, b"1")
        for part in parts:
            await service._log.append(encode(part), tags=["checkpoints"])
        await service.status_of("nothing")
        service._tasks[0].cancel()
        await service._restore()  # as a node that has missed records
        assert id_ in service._table.open
        service._has_work.set()
        for _ in range(20):  # all tasks that are ready have run
            await asyncio.sleep(0)
        service._tasks[0] = asyncio.ensure_future(service._follow())
        await service.status_of("nothing")
        assert not service._table.open
    assert node.begun == {id_: 1}


async def test_more_due_times_than_a_batch_holds_are_accepted() -> None:
    """Many schedules catch up on all missed times after a long stop."""
    logs = MemoryLogs(ClusterConfig(record_bytes_max=8 * KIB, batch_bytes_max=72 * KIB))
    node = Node(*[Returned(0, b"1")] * 800)
    async with running(logs, node, schedule_catch_up_max=100) as service:
        spec = ScheduleSpec("f", "* * * * *", "UTC", "all")
        since = time.time() - 3 * 3600
        service.schedule(DeployedSchedule(f"app.f{n}", spec, since) for n in range(8))
        async with asyncio.timeout(60):
            while len(node.begun) < 800:  # noqa: ASYNC110 - the node announces no single start
                await asyncio.sleep(0.01)


async def test_a_wait_for_an_outcome_trimmed_by_another_node_fails_at_once() -> None:
    """The asked node lags, and still remembers the outcome."""
    logs = MemoryLogs()
    async with running(logs, Node(Returned(0, b"1"))) as service:
        id_ = await service.accept("app.f", b"{}")
        await service.outcome(id_)
        over = service._table.get(id_)
        assert over is not None
        await service._log.trim(service._table.end, tag=over.stream)
        with pytest.raises(CallOutcomeUnknownError, match="no longer kept"):
            await service.outcome(id_)


async def test_a_taken_over_run_waits_for_the_deployment_of_its_function() -> None:
    """A node that takes a run over may read the deployment a moment later."""

    class Behind(Node):
        def start(
            self, name: str, arguments: bytes, *, position: int, depth: int, invocation: str
        ) -> Call:
            if not self.begun:
                self.begun[invocation] += 1
                raise UnknownFunctionError("No app 'app' is deployed.")
            return super().start(
                name, arguments, position=position, depth=depth, invocation=invocation
            )

    async with running(MemoryLogs(), Behind(Returned(0, b"1"))) as service:
        id_ = await service.accept("app.f", b"{}")
        assert await service.outcome(id_) == Returned(0, b"1")


async def test_lost_records_end_their_invocation_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs, node = MemoryLogs(), Node(Returned(0, b"1"))
    async with running(logs, node) as service:
        read, lost = service._log.read, 0

        async def damaged(seqnum: int, *, fresh: bool = False) -> Record | None:
            if seqnum == lost:
                raise DataLossError("Lost.", seqnum=seqnum, next_seqnum=seqnum + 1)
            return await read(seqnum, fresh=fresh)

        monkeypatch.setattr(service._log, "read", damaged)
        outcome = await service.outcome(await service.accept("app.f", b"{}"))
        assert isinstance(outcome, Failed)
        assert outcome.kind == "DataLossError"
        assert await service.outcome(await service.accept("app.f", b"{}")) == Returned(0, b"1")
