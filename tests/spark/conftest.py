"""One Spark session for all tests of this folder, and platforms that they read and write."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

import indilog
from indilog_pipeline.session import start, why_not
from tests.cluster.platform_process import platform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ValueT = TypeVar("_ValueT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, in one sentence, where Spark cannot start."""
    ours = [item for item in items if item.get_closest_marker("spark")]
    if ours and (reason := why_not()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


def quick_python(folder: Path) -> Path:
    """Make a Python for Spark's processes that imports the installed PySpark.

    By default each process imports PySpark from `pyspark.zip` and compiles it again. That is three
    times slower, and Spark waits only ten seconds for some processes.
    """
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the session that all tests of a process share."""
    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = str(quick_python(folder))
    session = start(
        "tests",
        master="local[2]",
        memory="600m",
        short=True,
        settings={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.showConsoleProgress": "false",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Return the data directory and the URL of a platform that all tests share."""
    directory = tmp_path_factory.mktemp("platform") / "data"
    with platform(directory) as running:
        yield directory, running.url


@pytest.fixture(scope="session")
def directory(shared: tuple[Path, str]) -> Path:
    """Return the data directory of the shared platform."""
    return shared[0]


@pytest.fixture(scope="session")
def url(shared: tuple[Path, str]) -> str:
    """Return the URL of the shared platform; each test uses logs of its own."""
    return shared[1]


@pytest.fixture
def on_log(url: str) -> Callable[[Callable[[indilog.Log], Awaitable[_ValueT]], str], _ValueT]:
    """Return a function that runs a call on a named log of the shared platform."""

    def run(call: Callable[[indilog.Log], Awaitable[_ValueT]], log: str) -> _ValueT:
        async def connected() -> _ValueT:
            async with indilog.connect(url) as client:
                return await call(client.log(log))

        return asyncio.run(connected())

    return run
