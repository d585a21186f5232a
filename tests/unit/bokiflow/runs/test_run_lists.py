"""Lists of runs: what they show, how much they read, and how they continue."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from bokiflow import (
    Flow,
    FlowSettingsError,
    RunEndedError,
    RunFailedError,
    RunIdInUseError,
    RunNotParkedError,
    UnknownRunError,
    Workflow,
    run_lists,
)
from bokiflow.ownership.partition import new_replica
from bokiflow.runs import recent_starts
from bokiflow.runs.backwards import Backwards
from bokiflow.runs.records import (
    INBOX_TAG,
    RecordedFailure,
    RunFinished,
    RunStarted,
    Signalled,
    encode,
    ended_tag,
    ends_tag,
    partition_of,
    partition_tag,
    run_tag,
    starts_tag,
)
from bokiflow.runs.states import State
from indilog import TrimmedError
from indilog.base.log import Record
from indilog.sdk.runs import RunPage, RunPlace
from indilog.testing import MemoryLogs
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLogs, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class CountingLogs(HookedLogs):
    """Logs that note which records were read, by the kind of their tag. Reads that wait for
    records, as executors do all the time, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records = 0
        self.reads = 0
        self.tags: set[str] = set()

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.wait is not None:
            return records
        self.reads += 1
        self.records += len(records)
        if records:
            self.tags.add(str(read.tag).split(":", 1)[0])
        return records


class Shop:
    """A flow with short, failing and waiting workflows, on logs in memory."""

    def __init__(self, logs: MemoryLogs | None = None, partitions: int = 4) -> None:
        self.logs = logs or MemoryLogs()
        self.flow = Flow("shop", partitions=partitions, passive_after=0)
        self.flow.attach(self.logs)
        self.log = self.logs.log("shop/flow")
        self.quick = self.flow.workflow(self._quick)
        self.waits = self.flow.workflow(self._waits)

    async def _quick(self, wf: Workflow, *, fails: bool = False) -> None:
        async def does() -> None:
            if fails:
                raise ValueError("no stamps")

        await wf.step(does, retries=0)

    async def _waits(self, wf: Workflow) -> object:
        return await wf.signal("go")

    _quick.__name__, _waits.__name__ = "quick", "waits"

    async def ended(self, id: str, *, fails: bool = False) -> None:  # noqa: A002
        handle = await self.quick.start(fails=fails, id=id)
        with suppress(RunFailedError):
            await handle.result(5)

    async def ids(self, **filters: object) -> list[str]:
        return [run.id for run in await self.flow.runs(**filters)]  # type: ignore[arg-type]


@pytest.fixture
def counted() -> tuple[Shop, CountingLogs]:
    logs = CountingLogs()
    return Shop(logs), logs


FILTERS = {
    "all": {},
    "running": {"state": State.RUNNING},
    "done": {"state": State.DONE},
    "failed": {"state": State.FAILED},
    "workflow": {"workflow": "quick"},
    "workflow and state": {"workflow": "quick", "state": State.FAILED},
    "age": {"newer_s": 3600.0},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
async def test_a_page_reads_about_the_records_of_its_answer(
    counted: tuple[Shop, CountingLogs], filters: dict[str, object]
) -> None:
    shop, logs = counted
    read: list[int] = []
    for _ in range(2):
        for number in range(120):
            await shop.ended(f"{len(read)}-{number}", fails=number % 10 == 0)
            if number % 30 == 0:
                await shop.waits.start(id=f"waits-{len(read)}-{number}")
        await shop.flow.runs()  # the partitions are read up to here
        counts = []
        for _ in range(3):  # the executor reads now and then, too
            logs.records = 0
            assert len(await shop.ids(limit=10, **filters)) >= 4
            counts.append(logs.records)
        read.append(min(counts))
    assert max(read) <= 60
    assert read[1] <= read[0] + 12, "it does not grow with the number of runs"


async def test_a_list_of_open_runs_reads_the_partitions_alone(
    counted: tuple[Shop, CountingLogs],
) -> None:
    shop, logs = counted
    for number in range(20):
        await shop.waits.start(id=f"w{number}")
        await shop.ended(f"q{number}")
    logs.tags.clear()
    assert await shop.ids(state=State.RUNNING) == [f"w{number}" for number in range(19, -1, -1)]
    assert logs.tags <= {"flow-p"}, "no run, and no list, was read"


async def test_a_list_says_what_ended_runs_did_and_for_what_others_wait() -> None:
    shop = Shop()
    await shop.ended("a", fails=True)
    await shop.waits.start(id="b")
    execution = shop.flow.runner.running["b"].execution
    await execution.note_waits(None, "signal 'go'", execution.run.end)
    waiting, failed = await shop.flow.runs()
    assert (waiting.id, waiting.state, waiting.waits, waiting.ended) == (
        "b", "running", "signal 'go'", None,
    )  # fmt: skip
    assert (failed.id, failed.state, failed.steps) == ("a", "failed", 1)
    assert failed.problem == "ValueError: Step 'does' failed: ValueError: no stamps"
    assert failed.ended is not None
    assert failed.began <= failed.ended


async def test_ended_runs_of_one_state_are_listed_by_their_ends() -> None:
    now = 1000.0
    shop = Shop(MemoryLogs(clock=lambda: now))
    late = await shop.waits.start(id="first begun, last ended")
    now += 10
    await shop.ended("a")
    now += 10
    await late.signal("go")
    await late.result(5)
    assert await shop.ids(state=State.DONE) == [late.id, "a"]
    assert await shop.ids() == ["a", late.id]
    assert await shop.ids(state=State.DONE, newer_s=5) == [late.id]
    assert await shop.ids(state=State.DONE, older_s=5) == ["a"]
    page = await shop.flow.runs(state=State.DONE, limit=1)
    assert [run.id for run in await shop.flow.runs(state=State.DONE, before=page.next)] == ["a"]


@pytest.mark.parametrize("state", [None, State.RUNNING, State.DONE])
async def test_pages_continue_while_runs_begin_and_end(state: State | None) -> None:
    """Each run that fits all the time is on exactly one page."""
    shop, chance = Shop(), random.Random(7)
    stable: list[str] = []
    for number in range(30):
        if state is State.DONE:
            await shop.ended(f"r{number}")
        else:
            await shop.waits.start(id=f"r{number}")
        stable.append(f"r{number}")
    ending = [await shop.waits.start(id=f"ends{number}") for number in range(10)]
    listed: list[str] = []
    before: RunPlace | None = None
    while True:
        page = await shop.flow.runs(state=state, limit=7, before=before)
        listed += [run.id for run in page]
        if (before := page.next) is None:
            break
        await shop.ended(f"new{len(listed)}")
        await shop.waits.start(id=f"new-open{len(listed)}")
        ends = ending.pop(chance.randrange(len(ending)))
        await ends.signal("go")
        await ends.result(5)
    assert len(set(listed)) == len(listed)
    assert [id_ for id_ in listed if id_ in set(stable)] == stable[::-1]
    if state is None:
        assert len([id_ for id_ in listed if id_.startswith("ends")]) == 10, "a run keeps its place"


async def test_an_end_without_effect_is_in_no_list() -> None:
    """Of an executor that had lost the run, and a repeated one."""
    shop = Shop(partitions=1)
    log, there = shop.log, partition_tag(0)
    state, other = State.DONE, State.FAILED

    def lists(ended: State) -> tuple[str, ...]:
        return (ended_tag(0), ends_tag(ended, None), ends_tag(ended, "quick"))

    started = RunStarted("quick", b'{"fails":false}', "dead", "v")
    tags = (run_tag("r"), starts_tag(None), starts_tag("quick"), there, INBOX_TAG)
    place = await log.append(encode(started), tags=tags)
    ends = RunFinished(7, b"1", workflow="quick", started_at=place)  # of an epoch that never was
    await log.append(encode(ends), tags=(run_tag("r"), there, *lists(state)))
    assert await shop.ids() == await shop.ids(state=State.RUNNING) == ["r"]
    assert await shop.ids(state=state) == await shop.ids(state=state, workflow="quick") == []
    for _ in range(2):
        failure = RecordedFailure("ValueError", "no stamps")
        ends = RunFinished(1, b"", failure, workflow="quick", started_at=place)
        await log.append(encode(ends), tags=(run_tag("r"), there, *lists(other)))
    assert await shop.ids(state=other) == ["r"]
    replica = new_replica(0)
    await replica.catch_up(log)
    again = new_replica(0)
    await replica.save(log)
    await again._load(log)
    assert again.state.void_ends == replica.state.void_ends != {}


async def test_an_ended_run_is_found_although_many_late_records_follow_its_end() -> None:
    shop = Shop()
    await shop.ended("a", fails=True)
    for number in range(20):
        await shop.log.append(encode(Signalled("go", b"1", str(number))), tags=[run_tag("a")])
    found = await run_lists.find_run(shop.log, shop.flow.runner, "a", "shop")
    assert found is not None
    assert (found.id, found.state, found.steps) == ("a", "failed", 1)


async def test_a_repeated_start_of_an_ended_run_is_no_open_run() -> None:
    """The owner of its partition removes it later; no owner runs here."""
    shop = Shop()
    await shop.ended("a")
    await shop.waits.start(id="b")
    await shop.flow.runner.stop()
    number = partition_of("a", 4)
    started = RunStarted("quick", b'{"fails":false}', "other", "v")
    tags = (run_tag("a"), starts_tag(None), starts_tag("quick"), partition_tag(number), INBOX_TAG)
    await shop.log.append(encode(started), tags=tags)
    assert await shop.ids() == ["b", "a"]
    assert await shop.ids(state=State.RUNNING) == ["b"]
    (run,) = await shop.flow.runs(workflow="quick")
    assert run.state is not None
    assert State(run.state) is State.DONE


# --- the reader


@pytest.mark.parametrize("sparse", [1, 3, 100, 2000])
@pytest.mark.parametrize("count", [5, 100, 1000])
async def test_a_tag_is_read_backwards_in_few_reads(sparse: int, count: int) -> None:
    logs = CountingLogs()
    log = logs.log("a")
    chance = random.Random(sparse)
    mine = []
    for number in range(2000):
        is_mine = number == 0 or chance.randrange(sparse) == 0
        place = await log.append(b"", tags=["mine" if is_mine else "other"])
        mine += [place] * is_mine
    for bound in (10**9, mine[len(mine) // 2], mine[0]):
        logs.reads = logs.records = 0
        backwards, found = Backwards(log, "mine", bound), list[int]()
        while page := await backwards.page(count):
            assert len(page) <= 8 * count + 8
            found += [record.seqnum for record in page]
        expected = [place for place in reversed(mine) if place <= bound]
        assert found == expected
        assert logs.records <= 3 * len(expected) + 40
        assert logs.reads <= 16 + 6 * len(expected) / count


async def test_a_backward_reader_ends_at_the_floor_and_skips_losses() -> None:
    logs = DamagedLogs()
    log = logs.log("a")
    places = [await log.append(b"", tags=["mine"]) for _ in range(60)]
    await log.trim(places[20], tag="mine")
    logs.lost |= {places[30], places[45], places[59]}
    backwards, found = Backwards(log, "mine"), list[int]()
    while page := await backwards.page(10):
        found += [record.seqnum for record in page]
    left = [place for place in places[20:] if place not in logs.lost]
    assert found == left[::-1]
    assert backwards.floor == places[20]
    await log.trim(places[59] + 1, tag="mine")
    assert await Backwards(log, "mine").page(10) == []
    with pytest.raises(TrimmedError):
        await log.read_prev("mine")


async def test_a_page_is_iterated() -> None:
    assert (list(RunPage()), len(RunPage())) == ([], 0)


# --- steering a run


async def test_a_run_with_a_long_history_is_steered_by_one_append_each(
    counted: tuple[Shop, CountingLogs],
) -> None:
    """From a process that does not execute it, and whose copy of the partition is up to date."""
    shop, logs = counted

    @shop.flow.workflow
    async def long(wf: Workflow) -> list[object]:
        for number in range(2000):
            wf.publish(number)
        return [await wf.signal("go"), await wf.signal("go"), await wf.signal("end")]

    await long.start(id="long")
    while len(await shop.log.read_range(run_tag("long"), limit=10_000)) < 2001:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other = Shop(logs)
    elsewhere = other.flow.workflow(long.definition.body).handle("long")
    await other.flow.runs(state=State.RUNNING)
    before = await shop.log.tail()
    logs.records = logs.reads = 0
    await elsewhere.signal("go", 1, key="same")
    await elsewhere.signal("go", 2, key="same")
    assert await shop.log.tail() == before + 2
    assert (logs.records <= 20, logs.reads <= 30) == (True, True)
    await elsewhere.signal("go", 3)
    await elsewhere.signal("end")
    assert await long.handle("long").result(20) == [1, 3, True]
    logs.records = 0
    for refused in (elsewhere.signal("go"), elsewhere.cancel()):
        with pytest.raises(RunEndedError):
            await refused
    with pytest.raises(RunNotParkedError, match="is done"):
        await elsewhere.retry()
    assert logs.records <= 30


async def test_a_signal_to_an_unknown_or_another_workflows_run_is_refused() -> None:
    shop = Shop()
    await shop.waits.start(id="w")
    with pytest.raises(UnknownRunError):
        await shop.waits.handle("x").signal("go")
    with pytest.raises(RunIdInUseError, match="one of workflow 'waits', not of 'quick'"):
        await shop.quick.handle("w").signal("go")
    await shop.waits.handle("w").cancel()
    with pytest.raises(RunFailedError):
        await shop.waits.handle("w").result(5)
    await shop.waits.handle("w").cancel()


async def test_a_status_that_is_read_again_reads_what_is_new(
    counted: tuple[Shop, CountingLogs],
) -> None:
    shop, logs = counted

    @shop.flow.workflow
    async def counts(wf: Workflow) -> None:
        for number in range(200):
            wf.publish(number)
        await wf.signal("go")

    handle = await counts.start(id="c")
    while (await handle.status()).steps < 200:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    logs.records = 0
    assert (await handle.status()).steps == 200
    assert logs.records <= 4
    await handle.signal("go")
    await handle.result(5)
    assert (await handle.status()).state is State.DONE
    assert (await handle.status()).steps == 201


async def test_a_beginning_of_ids_is_found_without_reading_the_starts_again(
    counted: tuple[Shop, CountingLogs],
) -> None:
    shop, logs = counted
    await shop.waits.start(id="old-1")
    for number in range(40):
        await shop.ended(f"order-{number}")
    other = Shop(logs)  # another process, with a memory of its own
    assert await other.ids(id_prefix="old") == ["old-1"]
    await shop.ended("old-2")
    await other.flow.runs(limit=1)  # the partitions are read up to here
    logs.records = 0
    assert await other.ids(id_prefix="old") == ["old-2", "old-1"]
    assert logs.records <= 30, "the other starts were not read again"
    assert await other.ids(id_prefix="old", workflow="waits") == ["old-1"]
    assert await other.ids(id_prefix="old", state=State.DONE) == ["old-2"]
    assert await other.ids(id_prefix="order-1", limit=2) == ["order-19", "order-18"]
    assert await other.ids(id_prefix="none") == []


@pytest.mark.parametrize("kept_max", [1, 3, 10, 100])
async def test_runs_older_than_those_in_memory_are_found(
    monkeypatch: pytest.MonkeyPatch, kept_max: int
) -> None:
    monkeypatch.setattr(recent_starts, "KEPT_MAX", kept_max)
    monkeypatch.setattr(recent_starts, "_PAGE", 2)
    shop, expected = Shop(), list[str]()
    for number in range(12):
        await shop.ended(f"{'ab'[number % 2]}-{number}")
        if number % 2:
            expected.insert(0, f"b-{number}")
        if number % 3 == 0:  # the memory has a part of them, and some are dropped
            assert await shop.ids(id_prefix="b-") == expected
    for _ in range(2):
        assert await shop.ids(id_prefix="b-") == expected
        found, page = list[str](), await shop.flow.runs(id_prefix="b-", limit=2)
        found += [run.id for run in page]
        while page.next is not None:
            page = await shop.flow.runs(id_prefix="b-", limit=2, before=page.next)
            found += [run.id for run in page]
        assert found == expected


async def test_runs_whose_starts_were_trimmed_are_not_found_in_memory() -> None:
    shop = Shop()
    for number in range(4):
        await shop.ended(f"a-{number}")
    assert len(await shop.ids(id_prefix="a-")) == 4
    starts = await shop.log.read_range(starts_tag(None))
    await shop.log.trim(starts[2].seqnum, tag=starts_tag(None))
    assert await shop.ids(id_prefix="a-") == ["a-3", "a-2"]


async def test_a_state_may_be_given_as_text() -> None:
    shop = Shop()
    await shop.waits.start(id="open")
    await shop.ended("done")
    assert await shop.ids(state="running") == ["open"]
    assert await shop.ids(state="parked") == []
    assert await shop.ids(state="done") == ["done"]
    with pytest.raises(FlowSettingsError, match=r"running, parked, done, .*, not 'open'"):
        await shop.ids(state="open")


async def test_a_page_of_open_runs_looks_at_about_the_runs_of_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    for number in range(200):
        await shop.waits.start(id=f"w{number}")
    looked = 0
    has_name = run_lists.RunFilter.has_name

    def counting(self: run_lists.RunFilter, id_: str, workflow: str) -> bool:
        nonlocal looked
        looked += 1
        return has_name(self, id_, workflow)

    monkeypatch.setattr(run_lists.RunFilter, "has_name", counting)
    expected = [f"w{number}" for number in range(199, 189, -1)]
    assert await shop.ids(state=State.RUNNING, limit=10) == expected
    assert looked <= 10 + 4, "and one more of each partition"
