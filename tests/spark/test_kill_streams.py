"""Streaming queries that are killed with SIGKILL at random, while appends continue."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import indilog
from tests.spark import copy_program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS: Final = 1
KILL_S_MAX: Final = 6.0
ERRORS_SHOWN_MAX: Final = 4_000
"""Characters of the program's standard error in the message of a failure: its end."""
pytestmark = [pytest.mark.spark, pytest.mark.heavy, pytest.mark.timeout(3000)]


@contextmanager
def appending(url: str, log: str) -> Iterator[None]:
    """Append a few records repeatedly, in a thread, while the block runs."""
    ended = threading.Event()

    async def append() -> None:
        number = 0
        async with indilog.connect(url) as client:
            while not ended.is_set():
                entries = [indilog.Entry(b"%d" % (number + n), [f"t{n}"]) for n in range(20)]
                await client.log(log).append_batch(entries)
                number += 20
                await asyncio.sleep(0.4)

    thread = threading.Thread(target=lambda: asyncio.run(append()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def program(url: str, folder: Path, log: str) -> subprocess.Popen[str]:
    with errors_of(folder).open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, copy_program.__file__, url, str(folder), log],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ  # what a killed JVM leaves behind is then in the test's own folder
            | {"SPARK_LOCAL_DIRS": str(folder), "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={folder}"},
        )


def errors_of(folder: Path) -> Path:
    """Return the file with the standard error of the latest program of a folder."""
    return folder / "errors.txt"


def last_errors(folder: Path) -> str:
    return errors_of(folder).read_text(errors="replace")[-ERRORS_SHOWN_MAX:]


def kill(process: subprocess.Popen[str]) -> None:
    """End the program with its JVM at once; its Python workers notice that themselves."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


async def all_of(url: str, log: str) -> list[indilog.Record]:
    found: list[indilog.Record] = []
    async with indilog.connect(url) as client:
        while page := await client.log(log).read_range(
            bound=found[-1].seqnum + 1 if found else 0, fresh=True
        ):
            found += page
    return found


def test_each_record_is_in_both_sinks_once(
    spark: SparkSession, url: str, tmp_path: Path, kills_wanted: int | None
) -> None:
    chance = random.Random(20261123)
    with appending(url, "killed"):
        for _ in range(kills_wanted or KILLS):
            process = program(url, tmp_path, "killed")
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n", last_errors(tmp_path)
            time.sleep(chance.uniform(0.0, KILL_S_MAX))
            assert process.poll() is None, f"it ended by itself: {last_errors(tmp_path)}"
            kill(process)
    copy_program.run(spark, url, str(tmp_path), "killed", finishes=True)
    wanted = asyncio.run(all_of(url, "killed"))
    files = spark.read.parquet(str(tmp_path / "parquet")).orderBy("seqnum").collect()
    assert [(row.seqnum, bytes(row.data)) for row in files] == [(r.seqnum, r.data) for r in wanted]
    copy = asyncio.run(all_of(url, "killed-copy"))
    assert [record.data for record in copy] == [record.data for record in wanted]
    assert [record.tags[0] for record in copy] == [record.tags[0] for record in wanted]
