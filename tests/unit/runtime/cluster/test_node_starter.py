"""Nodes are forked from one process, each as if it had been executed (decision 0034)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from indilog.runtime.cluster import fork_server, node_starter
from indilog.runtime.cluster.fork_server import NODE_PROGRAM
from indilog.runtime.cluster.held_process import STATUS_UNKNOWN, Process
from indilog.runtime.cluster.node_starter import NodeStarter

NODE = [*NODE_PROGRAM, "--name", "storage-0", "--metadata", "unix:///no/such/platform"]
"""A node that waits for a metadata store that does not exist, until it is asked to stop."""


@asynccontextmanager
async def starter() -> AsyncIterator[NodeStarter]:
    made = NodeStarter()
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.close()


@asynccontextmanager
async def node(starter: NodeStarter) -> AsyncIterator[Process]:
    """Start a node; kill it at the end."""
    connection, process = await starter.start(NODE, ())
    try:
        yield process
    finally:
        connection.close()
        if exists(process.pid):
            process.kill()
            await process.wait()


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(story())


def exists(pid: int) -> bool:
    """Return whether the process runs (and is no zombie)."""
    try:
        return field(pid, "State") != "Z"
    except OSError:
        return False


def field(pid: int, name: str) -> str:
    """Return a field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise AssertionError(name)


def parent(pid: int) -> int:
    return int(field(pid, "PPid"))


def command_of(pid: int) -> list[str]:
    """Return what `ps` shows."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def open_files(pid: int) -> list[str]:
    """Return the open files of a process, without those that it closes meanwhile."""
    files = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append(str(link.readlink()))
    return files


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - only the kernel knows
        await asyncio.sleep(0.001)


def test_nodes_are_processes_of_their_own_with_one_parent_that_has_one_thread() -> None:
    async def story() -> None:
        async with starter() as made, node(made) as first, node(made) as second:
            assert parent(first.pid) == parent(second.pid) != os.getpid()
            assert field(parent(first.pid), "Threads") == "1"
            for process in (first, second):
                await until(lambda pid=process.pid: os.getsid(pid) == pid)  # type: ignore[misc]
                assert os.getpgid(process.pid) == process.pid

    run(story)


def test_ps_shows_each_process_as_what_it_is() -> None:
    async def story() -> None:
        async with starter() as made, node(made) as process:
            await until(lambda: command_of(process.pid)[: len(NODE)] == NODE)
            word, number = command_of(process.pid)[len(NODE) :]
            assert word == "--supervisor-fd"
            assert int(number) > 2
            server = command_of(parent(process.pid))
            assert server[:3] == [sys.executable, "-m", "indilog.runtime.cluster.fork_server"]
            assert "--room" not in server

    run(story)


def test_a_longer_command_than_there_is_room_for_is_cut_in_ps() -> None:
    command = [*NODE, "--control", "/" + "x" * 2000]

    async def story() -> None:
        async with starter() as made:
            connection, process = await made.start(command, ())
            await until(lambda: command_of(process.pid)[: len(NODE)] == NODE)
            assert "x" * 2000 not in command_of(process.pid)[-1]
            connection.close()
            process.kill()
            await process.wait()

    run(story)


def test_a_node_inherits_what_it_is_given_and_nothing_of_its_siblings(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)

    async def story() -> None:
        async with starter() as made, node(made), node(made):
            connection, process = await made.start(NODE, [lock])
            await until(lambda: command_of(process.pid)[: len(NODE)] == NODE)
            files = open_files(process.pid)
            assert str(tmp_path / "lock") in files
            assert "anon_inode:[pidfd]" not in files
            # The fork server reports the child before it closes its own copies.
            await until(lambda: str(tmp_path / "lock") not in open_files(parent(process.pid)))
            connection.close()
            process.kill()
            await process.wait()

    run(story)
    os.close(lock)


def test_exit_statuses_and_signals_are_reported() -> None:
    async def story() -> None:
        async with starter() as made:
            connection, refused = await made.start([*NODE_PROGRAM, "--name"], ())
            assert await refused.wait() == 2  # argparse: it lacks arguments
            connection.close()
            connection, killed = await made.start(NODE, ())
            killed.kill()
            assert await killed.wait() == -signal.SIGKILL
            connection.close()
            connection, lonely = await made.start(NODE, ())
            connection.close()  # a node that was not ready ends with its supervisor
            assert await lonely.wait() == os.EX_OK

    run(story)


def test_a_process_that_is_gone_is_not_signalled() -> None:
    """The process's descriptor was closed, and may be that of another process by now."""

    async def story() -> None:
        async with starter() as made:
            connection, process = await made.start(NODE, ())
            connection.close()
            await process.wait()
            for signalled in (process.terminate, process.kill):
                with pytest.raises(ProcessLookupError):
                    signalled()

    run(story)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "unnoticed"])
def test_a_killed_fork_server_harms_no_node_and_is_replaced(*, is_noticed: bool) -> None:
    """The loop may not have run since the kill: the next start then finds a broken connection."""

    async def story() -> None:
        async with starter() as made, node(made) as first:
            server = parent(first.pid)
            os.kill(server, signal.SIGKILL)
            if is_noticed:
                await until(lambda: not exists(server))
            else:
                # It blocks, so the loop does not run.
                os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
            async with node(made) as second:
                assert exists(first.pid)
                assert parent(second.pid) not in {os.getpid(), server}
            first.kill()
            assert await first.wait() == STATUS_UNKNOWN  # its parent is gone

    run(story)


def test_a_fork_server_that_hangs_is_killed_and_the_node_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with starter() as made, node(made) as first:
            server = parent(first.pid)
            assert server != os.getpid()
            monkeypatch.setattr(node_starter, "_ANSWER_S_MAX", 0.2)
            os.kill(server, signal.SIGSTOP)
            async with node(made) as second:
                assert parent(second.pid) == os.getpid()
                await until(lambda: not exists(server))
                assert exists(first.pid)

    run(story)


def test_a_fork_server_that_stalls_for_6_s_still_reports_the_exit_status() -> None:
    """A busy machine may let it wait that long."""

    async def story() -> None:
        async with starter() as made, node(made) as process:
            server = parent(process.pid)
            os.kill(server, signal.SIGSTOP)
            process.kill()
            asyncio.get_running_loop().call_later(6.0, os.kill, server, signal.SIGCONT)
            assert await process.wait() == -signal.SIGKILL

    run(story)


def test_a_fork_server_that_never_reports_an_exit_status_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with starter() as made, node(made) as process:
            server = parent(process.pid)
            os.kill(server, signal.SIGSTOP)
            monkeypatch.setattr(node_starter, "_ANSWER_S_MAX", 0.1)
            process.kill()
            assert await process.wait() == STATUS_UNKNOWN
            await until(lambda: not exists(server))

    run(story)


def test_nodes_are_executed_where_no_fork_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def broken(descriptor: int) -> list[str]:
        tries.append(descriptor)
        return [sys.executable, "-S", "-E", "-c", "raise SystemExit(1)"]

    monkeypatch.setattr(fork_server, "command", broken)

    async def story() -> None:
        async with starter() as made, node(made) as first, node(made) as second:
            assert parent(first.pid) == parent(second.pid) == os.getpid()
            assert len(tries) == 1

    run(story)


def test_a_fork_server_ends_with_its_starter_and_nodes_continue() -> None:
    async def story() -> None:
        async with starter() as made:
            connection, process = await made.start(NODE, ())
            server = parent(process.pid)
            await made.close()
            assert not exists(server)
            assert exists(process.pid)
            connection.close()
            process.kill()
            assert await process.wait() == STATUS_UNKNOWN

    run(story)


def test_a_fork_server_does_not_fork_where_imports_start_threads(tmp_path: Path) -> None:
    """As a numpy does that is built with another library than OpenBLAS."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(
            fork_server.command(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "The fork server cannot fork: an import has started a thread (2 run).\n"


def test_the_environment_of_nodes_is_that_of_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    before = dict(os.environ)
    fork_server.imported_node_main()
    assert dict(os.environ) == before
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    fork_server.imported_node_main()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
