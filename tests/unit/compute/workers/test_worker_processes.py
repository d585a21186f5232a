"""Workers are forked from one process, each as if it had been executed (decision 0069)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from indilog.config import NodeConfig
from indilog.link.link_messages import Returned
from indilog.link.worker_messages import Invoke, Load, Loaded
from indilog_compute.workers.process import WorkerProcess, output_limits
from indilog_compute.workers.starting import fork_server
from indilog_compute.workers.starting.worker_starter import WorkerStarter
from tests.support.link_pair import LIMITS

SOURCE: Final = """
import os, sys
import indilog

app = indilog.App("shown")

@app.function
async def environment() -> dict[str, str]:
    return dict(os.environ)

@app.function
async def process() -> list[object]:
    return [os.getpid(), os.getppid(), os.getsid(0), sys.argv[0], sys.path, os.isatty(0)]

@app.function
async def leave(code: int) -> None:
    os._exit(code)
"""
pytestmark = [pytest.mark.asyncio, pytest.mark.cluster]


@asynccontextmanager
async def starter(*environment: str) -> AsyncIterator[WorkerStarter]:
    made = WorkerStarter(environment)
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.close()


@asynccontextmanager
async def worker(start: WorkerStarter, directory: Path) -> AsyncIterator[WorkerProcess]:
    """Start a worker, and load `SOURCE` into it."""
    made = await start(
        0,
        LIMITS,
        directory=directory,
        threads_max=2,
        output=output_limits(NodeConfig()),
        serve=lambda *_: None,
        on_lost=lambda _: None,
    )
    try:
        assert await made.until_ready()
        assert isinstance(await made.link.ask(Load(1, None, {"shown.py": SOURCE})), Loaded)
        yield made
    finally:
        await made.stopped()


async def call(worker: WorkerProcess, function: str) -> Any:  # noqa: ANN401 - any JSON value
    answer = await worker.link.ask(Invoke(1, function, b"", "i-1", 0, 0))
    assert isinstance(answer, Returned), answer
    return msgspec.json.decode(answer.result)


def read(pid: int, name: str) -> str:
    """Return a file of /proc/PID."""
    return Path(f"/proc/{pid}/{name}").read_text()


def parent(pid: int) -> int:
    return int(read(pid, "stat").rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptors(pid: int) -> list[str]:
    """Return the sockets, pipes and shared memory that a process has open, but not its standard
    input and output.
    """
    found = {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    kinds = ("socket:", "pipe:", "/memfd:")
    return [name for fd, name in found.items() if int(fd) > 2 and name.startswith(kinds)]


async def test_workers_are_processes_with_one_parent_that_has_one_thread(tmp_path: Path) -> None:
    async with (
        starter() as start,
        worker(start, tmp_path / "1") as first,
        worker(start, tmp_path / "2") as second,
    ):
        assert parent(first.pid) == parent(second.pid) != os.getpid()
        assert "Threads:\t1\n" in read(parent(first.pid), "status")
        shown = read(first.pid, "cmdline").split("\0")
        assert shown[:6] == [
            *fork_server.WORKER_PROGRAM, "--directory", str(tmp_path / "1")
        ]  # fmt: skip
        pid, ppid, session, program, path, _ = await call(first, "process")
        assert (pid, ppid, session) == (first.pid, parent(first.pid), first.pid)
        assert program == "indilog_compute.workers"
        assert "" not in path  # -P: no module of the working directory hides one


async def test_a_worker_has_no_variables_of_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDILOG_TOKEN", "secret")
    monkeypatch.setenv("STRIPE_KEY", "passed")
    async with starter("STRIPE_KEY") as start, worker(start, tmp_path / "1") as made:
        for pid in (made.pid, parent(made.pid)):
            given = read(pid, "environ")
            assert "secret" not in given
            assert "STRIPE_KEY=passed" in given
        found = await call(made, "environment")
        assert isinstance(found, dict)
        assert "INDILOG_TOKEN" not in found
        assert found["STRIPE_KEY"] == "passed"


async def test_a_worker_holds_nothing_of_its_siblings(tmp_path: Path) -> None:
    async with starter() as start, worker(start, tmp_path / "1") as first:
        before = descriptors(first.pid)
        async with worker(start, tmp_path / "2") as second:
            after = descriptors(second.pid)
            assert len(after) == len(before)
            shared = set(after) & set(before)
            assert all(name.startswith("/memfd:") for name in shared)  # all have one name


async def test_exit_statuses_and_signals_are_reported(tmp_path: Path) -> None:
    async with starter() as start:
        async with worker(start, tmp_path / "1") as left:
            leave = Invoke(1, "leave", b'{"code": 3}', "i-1", 0, 0)
            left.link.post(leave, lambda _: None)
            await left.until_lost_or_replaced()
            assert await left.stopped() == 3
            assert not left.was_ended_by_others
        async with worker(start, tmp_path / "2") as killed:
            os.kill(killed.pid, signal.SIGKILL)
            await killed.until_lost_or_replaced()
            assert await killed.stopped() == -signal.SIGKILL
            assert killed.was_ended_by_others


async def test_a_killed_fork_server_harms_no_worker_and_is_replaced(tmp_path: Path) -> None:
    async with starter() as start, worker(start, tmp_path / "1") as first:
        server = parent(first.pid)
        os.kill(server, signal.SIGKILL)
        async with worker(start, tmp_path / "2") as second:
            assert parent(second.pid) not in {server, os.getpid()}
            assert await call(first, "process")
            os.kill(first.pid, signal.SIGKILL)
            await first.until_lost_or_replaced()
            await first.stopped()
            assert first.was_ended_by_others  # its exit status is unknown


async def test_workers_are_executed_where_no_fork_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", "raise SystemExit(1)"]

    monkeypatch.setattr(fork_server, "command", broken)
    async with starter() as start:
        async with worker(start, tmp_path / "1") as executed:
            assert parent(executed.pid) == os.getpid()
            assert await call(executed, "process")
            leave = Invoke(1, "leave", b'{"code": 3}', "i-1", 0, 0)
            executed.link.post(leave, lambda _: None)
            await executed.until_lost_or_replaced()
            assert await executed.stopped() == 3
        async with worker(start, tmp_path / "2") as second:
            assert parent(second.pid) == os.getpid()


async def test_the_fork_server_ends_with_its_starter(tmp_path: Path) -> None:
    async with starter() as start, worker(start, tmp_path / "1") as made:
        server = parent(made.pid)
        assert is_there(server)
    assert not is_there(server)
