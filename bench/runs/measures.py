"""What `bench.runs` measures. Figures with the suffix `_s` are seconds."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from bench.trim import settle
from bokiflow import Flow, Workflow
from bokiflow.collecting import Collector
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.runs.records import (
    INBOX_TAG,
    PARTITIONS,
    RecordedFailure,
    RunFinished,
    RunStarted,
    RunWaits,
    StepDecided,
    encode,
    ended_tag,
    ends_tag,
    partition_of,
    partition_tag,
    run_tag,
    starts_tag,
)
from bokiqueue import Queue
from bokistore import Store
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import Entry, Log
from indilog.client import Client
from indilog.runtime.cluster.assembly import Platform

_BATCH: Final = 300
_CALLERS: Final = 64
_FEW: Final = 1_000
_LEASE_S: Final = 2.0
_PAGE: Final = 100
_POPS: Final = 200
_SHARE_MIN: Final = PARTITIONS // 6
_WAIT_S: Final = 600.0


class Scene(NamedTuple):
    """A platform for one measurement.

    Attributes:
        platform: the platform, in this process.
        client: a session of it.
        directory: its data.
        rounds: how often a latency is measured; the median counts.
    """

    platform: Platform
    client: Client
    directory: Path
    rounds: int


def flow_on(scene: Scene, log: str = "runs") -> Flow:
    """Return a new flow, as another process would have it, whose workflow waits for a signal."""
    flow = Flow("bench", log=log, lease=_LEASE_S, passive_after=0.5)
    flow.attach(scene.client)

    @flow.workflow
    async def waits(wf: Workflow) -> object:
        return await wf.signal("go")

    @flow.workflow
    async def quick(wf: Workflow) -> None: ...

    return flow


async def write_waiting(log: Log, count: int, prefix: str = "wait") -> None:
    """Write runs that wait for a signal."""
    entries: list[Entry] = []
    for number in range(count):
        id_ = f"{prefix}-{number}"
        there = partition_tag(partition_of(id_, PARTITIONS))
        lists = (starts_tag(None), starts_tag("waits"))
        started = RunStarted("waits", b"{}", "writer", "v")
        waits = RunWaits(
            1, None, "signal 'go' (operation 1)", MAX_SEQNUM
        )  # no record comes between
        wakes = () if number else (INBOX_TAG,)  # drivers read the inbox
        entries.append(Entry(encode(started), (run_tag(id_), *lists, there, *wakes)))
        entries.append(Entry(encode(waits), (run_tag(id_), there)))
    await _append(log, entries)


async def write_ended(log: Log, count: int) -> None:
    """Write runs with one step that have ended; every hundredth has failed."""
    places: dict[str, int] = {}
    for first in range(0, count, _BATCH):
        ids = [f"order-{number}" for number in range(first, min(first + _BATCH, count))]
        starts = [
            Entry(
                encode(RunStarted("quick", b'{"number":1}', "writer", "v")),
                (
                    run_tag(id_), starts_tag(None), starts_tag("quick"),
                    partition_tag(partition_of(id_, PARTITIONS)),
                ),
            )
            for id_ in ids
        ]  # fmt: skip
        places = dict(zip(ids, await log.append_batch(starts), strict=True))
        ends = [entry for id_ in ids for entry in _end(id_, places[id_])]
        await log.append_batch(ends)


def _end(id_: str, place: int) -> Sequence[Entry]:
    number = partition_of(id_, PARTITIONS)
    is_failed = int(id_.rpartition("-")[2]) % 100 == 0
    state = "failed" if is_failed else "done"
    step = StepDecided(1, "1", "pay", "step", b'"paid"')
    failure = RecordedFailure("ValueError", "no stamps") if is_failed else None
    ends = RunFinished(1, b"", failure, workflow="quick", started_at=place, steps=1)
    tags = (
        run_tag(id_), partition_tag(number), ended_tag(number),
        ends_tag(state, None), ends_tag(state, "quick"),
    )  # fmt: skip
    return Entry(encode(step), (run_tag(id_),)), Entry(encode(ends), tags)


async def _append(log: Log, entries: Sequence[Entry]) -> None:
    for first in range(0, len(entries), _BATCH):
        await log.append_batch(entries[first : first + _BATCH])


async def _latency_s(act: Callable[[], Awaitable[object]], rounds: int) -> float:
    took_s = []
    await act()
    for _ in range(max(3, rounds)):
        started = time.perf_counter()
        await act()
        took_s.append(time.perf_counter() - started)
    return median(took_s)


async def lists(scene: Scene, count: int) -> dict[str, float]:
    """Measure lists of runs among `count` ended and `count` waiting ones."""
    flow, log = flow_on(scene), scene.client.log("runs")
    await write_waiting(log, count)
    await write_ended(log, count)
    started = time.perf_counter()
    await flow.runs(limit=1)
    found = {"first list, which reads the partitions_s": time.perf_counter() - started}
    filters: dict[str, dict[str, Any]] = {
        "all": {},
        "running": {"state": "running"},
        "parked (none)": {"state": "parked"},
        "done": {"state": "done"},
        "failed (1 %)": {"state": "failed"},
        "workflow": {"workflow": "waits"},
        "workflow and state": {"workflow": "quick", "state": "failed"},
        "older than some": {"older_s": 1.0},
        "beginning of ids (100 of all)": {"id_prefix": "wait-1"},
    }
    for name, filter_ in filters.items():

        async def act(filter_: dict[str, Any] = filter_) -> object:
            return await flow.runs(limit=_PAGE, **filter_)

        found[f"newest {_PAGE}, {name}_s"] = await _latency_s(act, scene.rounds)
    handle = flow.handle("waits", f"wait-{count // 2}")
    found["status of one_s"] = await _latency_s(handle.status, scene.rounds)
    found["signal to one_s"] = await _latency_s(lambda: handle.signal("go"), scene.rounds)
    return found


async def takeover(scene: Scene, count: int) -> dict[str, float]:
    """Measure the memory of `count` waiting runs, and how long a takeover of a third takes."""
    log = scene.client.log("runs")
    await write_waiting(log, count)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    partitions = [OwnedPartition(number, 0) for number in range(PARTITIONS)]
    for partition in partitions:
        await partition.catch_up(log)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert sum(len(partition.state.runs) for partition in partitions) == count
    partitions.clear()
    flows = [flow_on(scene) for _ in range(3)]
    runners = [flow.runner_of(scene.client) for flow in flows]
    driving = [asyncio.create_task(flow.drive(scene.client)) for flow in flows]
    await runners[0].join(scene.client, range(PARTITIONS))  # the runs had no owner
    await write_waiting(log, 1, "last")  # so that all drivers look
    async with asyncio.timeout(_WAIT_S):
        while not all(len(runner.owned) >= _SHARE_MIN for runner in runners):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    gone = len(runners[0].owned)
    started = time.perf_counter()
    driving[0].cancel()
    async with asyncio.timeout(_WAIT_S):
        while not _have_all(runners[1:]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    took_s = time.perf_counter() - started
    for task in driving[1:]:
        task.cancel()
    await asyncio.gather(*driving, return_exceptions=True)
    return {
        "bytes of memory of a waiting run": traced / count,
        "waiting runs that were taken over": count * gone / PARTITIONS,
        "takeover of a third_s": took_s,
    }


def _have_all(runners: Sequence[Any]) -> bool:
    owned = [partition for runner in runners for partition in runner.owned.values()]
    return len(owned) == PARTITIONS and all(partition.is_loaded for partition in owned)


async def ended(scene: Scene, count: int) -> dict[str, float]:
    """Measure what `count` ended runs leave after their collection."""
    flow, log = flow_on(scene), scene.client.log("runs")
    runner = flow.runner_of(scene.client)
    empty = await settle(scene.platform, scene.directory)
    await write_ended(log, count)
    before = await settle(scene.platform, scene.directory)
    await runner.join(scene.client, range(PARTITIONS))
    started = time.perf_counter()
    collected = await Collector(runner, 0.0).collect(log, await log.now() + 1.0)
    took_s = time.perf_counter() - started
    assert collected == count, f"{collected} of {count} runs were collected"
    for partition in list(runner.owned.values()):
        await partition.catch_up(log)
        for _ in range(2):  # a checkpoint trims what the one before covers
            await partition._replica.save(log)  # noqa: SLF001 - due only after 256 records
            await log.append(encode(RunStarted("x", b"", "", "")), tags=[_tag_of(partition)])
            await partition.catch_up(log)
    await runner.stop()
    after = await settle(scene.platform, scene.directory)
    return {
        "bytes on disk of a run": (before.used_bytes - empty.used_bytes) / count,
        "bytes of index of a run": (before.index_bytes - empty.index_bytes) / count,
        "bytes on disk of a collected run": (after.used_bytes - empty.used_bytes) / count,
        "bytes of index of a collected run": (after.index_bytes - empty.index_bytes) / count,
        "collection of a run_s": took_s / count,
    }


def _tag_of(partition: OwnedPartition) -> str:
    return partition_tag(partition.number)


async def queue(scene: Scene, count: int) -> dict[str, float]:
    """Measure pops among few and among `count` messages, while one delayed message waits."""
    found: dict[str, float] = {}
    for queued in sorted({min(_FEW, count), count}):
        log = scene.client.log(f"queue-{queued}")
        one = Queue(log, "q", shards=1)
        await one.push(b"later", delay=86_400.0)
        await _each(queued, lambda _, one=one: one.push(b"x" * 100))  # type: ignore[misc]

        async def pop(one: Queue = one) -> None:
            message = await one.take()
            assert message is not None, "there are messages left"
            await message.acknowledge()

        pops = min(_POPS, queued // 2)
        found[f"pop among {queued:,}_s"] = await _latency_s(pop, pops)
        async with asyncio.timeout(_WAIT_S):
            while left := await _ready(one):
                await asyncio.gather(*(pop() for _ in range(min(_CALLERS, left))))
        records, bound = 0, 0
        try:
            while page := await log.read_range(None, bound):
                records, bound = records + len(page), page[-1].seqnum + 1
        finally:
            found[f"records left of {queued:,} messages"] = records
    return found


async def _ready(one: Queue) -> int:
    return (await one.stats()).depth - 1  # without the delayed one


async def objects(scene: Scene, count: int) -> dict[str, float]:
    """Measure the collection of `count` objects that were written three times."""
    log = scene.client.log("objects")
    store = Store(log)
    empty = await settle(scene.platform, scene.directory)
    for turn in range(3):
        await _each(count, lambda number, turn=turn: store.put(f"o-{number}", {"n": turn}))  # type: ignore[misc]
    before = await settle(scene.platform, scene.directory)
    started = time.perf_counter()
    await store.collect(keep=0, keep_ids=0)
    took_s = time.perf_counter() - started
    after = await settle(scene.platform, scene.directory)
    return {
        "collection of an object_s": took_s / count,
        "bytes on disk of an object": (before.used_bytes - empty.used_bytes) / count,
        "bytes on disk of a collected object": (after.used_bytes - empty.used_bytes) / count,
    }


async def _each(count: int, act: Callable[[int], Awaitable[object]]) -> None:
    for first in range(0, count, _CALLERS):
        await asyncio.gather(*map(act, range(first, min(first + _CALLERS, count))))
