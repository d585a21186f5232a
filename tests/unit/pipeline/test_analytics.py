"""Objects at a seqnum, runs, and pictures, without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import indilog
from bokiflow.runs.records import (
    RecordedFailure,
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
)
from bokistore import Store, ViewCache
from bokistore.decisions import CELL
from indilog.base.errors import ConfigError, TrimmedError
from indilog_pipeline.analytics.chart import bar_chart
from indilog_pipeline.analytics.directory_log import DirectoryLog, ReadOnlyLogError
from indilog_pipeline.analytics.jobs import Source, check_job
from indilog_pipeline.analytics.objects import object_table
from indilog_pipeline.analytics.workflows import run_row
from indilog_pipeline.log_image import LogImage

OBJECTS, OPERATIONS = 6, 120
Objects = dict[str, tuple[int | None, object, tuple[str, ...]]]


async def write(
    log: indilog.Log, other: indilog.Log, chance: random.Random, *, collects: bool
) -> None:
    """Write objects in operations and conflicting transactions; perhaps collect, half way."""
    store = Store(log)
    for step in range(OPERATIONS):
        name = f"o{chance.randrange(OBJECTS)}"
        match chance.randrange(5):
            case 0:
                await store.put(name, {"n": step}, tags=["t"] if chance.random() < 0.5 else [])
            case 1:
                await store.delete(name)
            case 2:
                await store.set(name, "at", step)
            case 3:
                await conflict(store, name, step)
            case _:
                await log.append(b"of another program", tags=["plain", 7])
        if step == OPERATIONS // 2:
            # Whole cells are collected, of the seqnums of all logs.
            await other.append_batch([indilog.Entry(b"")] * CELL)
            if collects:
                await store.collect(keep=0)


async def conflict(store: Store, name: str, step: int) -> None:
    """Write in a transaction that read an object, which every other time is changed meanwhile."""
    with contextlib.suppress(indilog.ConflictError):
        async with store.transaction() as transaction:
            await transaction.get(name)
            transaction.set("other", "by", step)
            if step % 2:
                await store.set(name, "between", step)


async def state(log: indilog.Log, at: int) -> Objects | None:
    """Return what BokiStore itself reads at a seqnum; None: that was trimmed."""
    found: Objects = {}
    snapshot = Store(log, cache=ViewCache()).at(at)
    try:
        for name in [*(f"o{number}" for number in range(OBJECTS)), "other"]:
            if (obj := await snapshot.get(name)).exists:
                found[name] = (obj.view.version, obj.value, obj.tags)
    except TrimmedError:
        return None
    return found


def table_state(directory: Path, at: int) -> Objects | None:
    try:
        rows = object_table(str(directory), log="shop", at=at).to_pylist()
    except TrimmedError:
        return None
    return {
        row["name"]: (row["version"], json.loads(row["value"]), tuple(row["tags"])) for row in rows
    }


@pytest.mark.parametrize("collects", [False, True])
def test_objects_at_a_seqnum_are_those_that_the_store_reads_there(
    tmp_path: Path, *, collects: bool
) -> None:
    chance = random.Random(collects)

    async def story() -> list[tuple[int, Objects | None]]:
        async with indilog.open(tmp_path / "data") as client:
            log = client.log("shop")
            await write(log, client.log("other"), chance, collects=collects)
            tail = await log.tail()
            places = sorted({0, CELL - 1, *chance.sample(range(CELL, tail), 10), tail - 1})
            places = places if collects else [*chance.sample(range(CELL), 10), *places]
            return [(at, await state(log, at)) for at in places]

    wanted = asyncio.run(story())
    if collects:  # what is not named any more is not known below: no state at all
        wanted = [(at, None if at < CELL - 1 else found) for at, found in wanted]
        assert None in [found for _, found in wanted]
    else:
        assert None not in [found for _, found in wanted]
    assert [(at, table_state(tmp_path / "data", at)) for at, _ in wanted] == wanted
    assert wanted[-1][1], "there are objects at the end"
    ends = object_table(str(tmp_path / "data")).to_pylist()
    assert {row["name"] for row in ends} == set(wanted[-1][1])


def test_beyond_the_end_there_are_no_objects(tmp_path: Path) -> None:
    async def story() -> None:
        async with indilog.open(tmp_path / "data") as client:
            await Store(client.log("shop")).put("a", {"n": 1})

    asyncio.run(story())
    with pytest.raises(ValueError, match="there is no state as of 99 yet"):
        object_table(str(tmp_path / "data"), log="shop", at=99)


def test_a_log_of_a_directory_answers_as_its_platform(tmp_path: Path) -> None:
    calls = [
        *(("read", (seqnum,)) for seqnum in range(14)),
        *(
            (name, (tag, bound))
            for name in ("read_next", "read_prev", "read_range")
            for tag in (None, "x", 7, "7", "none")
            for bound in range(14)
        ),
        ("tail", ()),
    ]

    async def answers(log: indilog.Log) -> list[object]:
        found: list[object] = []
        for name, arguments in calls:
            try:
                found.append(await getattr(log, name)(*arguments))
            except TrimmedError as error:
                found.append(error.first_seqnum)
        return found

    async def story() -> None:
        async with indilog.open(tmp_path / "data") as client:
            log, other = client.log("a"), client.log("b")
            tags: list[list[str | int]] = [["x"], [7], ["7"], ["x", 7]]
            for number in range(4):
                await log.append(b"%d" % number, tags=tags[number])
                await other.append(b"other")
                await log.append(b"bare")
            await log.trim(2)
            await log.trim(4, tag="x")
            wanted = await answers(log)
        assert await answers(DirectoryLog(LogImage.read(tmp_path / "data"), "a")) == wanted
        assert 2 in wanted
        assert 4 in wanted

    asyncio.run(story())


def test_a_log_of_a_directory_refuses_changes(tmp_path: Path) -> None:
    async def story() -> None:
        async with indilog.open(tmp_path / "data") as client:
            await client.log("a").append(b"1")
        log = DirectoryLog(LogImage.read(tmp_path / "data"), "a")
        for change in (log.append(b"2"), log.append_batch([]), log.trim(0), log.set_retention()):
            with pytest.raises(ReadOnlyLogError, match="only its platform changes it"):
                await change

    asyncio.run(story())


def test_a_run_is_one_row_of_its_effective_records() -> None:
    failure = RecordedFailure("ValueError", "no")
    records: list[RunRecord] = [
        RunStarted("buy", b"{}", "one", "v"),
        StepDecided(1, "0", "price", "step", b"1"),
        RunTaken(2, "two"),
        StepDecided(1, "1", "pay", "step", b"1"),  # of an executor that lost the run
        StepDecided(2, "1", "pay", "step", b"", failure),
        RunFinished(2, b"", failure),
        RunFinished(2, b"1"),  # a second end has no effect
    ]
    rows = [(seqnum, 1_000_000 * seqnum, encode(record)) for seqnum, record in enumerate(records)]
    rows.append((99, 99_000_000, b"of another program"))
    random.Random(1).shuffle(rows)
    assert run_row(rows) == ("buy", "failed", 0, 5_000_000, 2, 1, 1)
    assert run_row(row for row in rows if row[0] in {0, 1}) == (
        "buy", "running", 0, None, 1, 0, 0,
    )  # fmt: skip
    assert run_row(row for row in rows if row[0] > 0) is None


def test_a_picture_is_well_formed_and_true_to_scale() -> None:
    svg = bar_chart('<"tags">', "records & bytes", [("a\x00<", 8.0), ("b" * 80, 2.0), ("c", -1.0)])
    root = ET.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{name}rect")][1:]
    assert widths == [480.0, 120.0, 0.0]
    text = [element.text for element in root.iter(f"{name}text")]
    assert text[:3] == ['<"tags">', "records & bytes", "a?<"]
    assert "nothing to show" in bar_chart("t", "u", [])
    assert ET.fromstring(bar_chart("t", "u", [("a", 0.0)])) is not None


def test_long_labels_keep_their_ends() -> None:
    hour = "2026-11-23 13:00 · social · store:timeline:"
    shared = "x" * 90
    labels = [f"{hour}17", f"{hour}18", f"{shared}/1", f"{shared}/2"]
    root = ET.fromstring(bar_chart("t", "u", [(label, 1.0) for label in labels]))
    text = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    shown = text[2::2]
    assert shown[:2] == labels[:2]
    assert [label[-2:] for label in shown[2:]] == ["/1", "/2"]
    assert max(map(len, shown)) == 90


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("hotness", Source("data"), "the jobs are volume, tags, lag, workflows, objects"),
        ("tags", Source("data", at=3), "Only `objects` are as of a seqnum"),
        ("objects", Source("data", skips_gaps=True), "leave --skip-gaps out"),
        ("tags", Source(url="http://127.0.0.1:1"), "give --log"),
    ],
)
def test_a_job_that_cannot_be_done_is_refused(name: str, source: Source, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_job(name, source)
