"""A supervised process is started, monitored and restarted, and ends with its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from indilog.base.errors import NotReadyError
from indilog.config import NodeConfig, node_config
from indilog.runtime.cluster.supervised_process import SupervisedProcess

CONFIG = node_config(restart_s_min=0.01, restart_s_max=0.02, stop_timeout_s=0.3, hang_s=60.0)

CHILD = """
import os, signal, socket, sys
line = socket.socket(fileno=int(sys.argv[-1]))
"""
READY = CHILD + "line.send(b'ready %d\\n' % os.getpid())\n"
LIVES = READY + "line.recv(1)\n"


def process(code: str, *, config: NodeConfig = CONFIG, failures_max: int = 3) -> SupervisedProcess:
    command = [sys.executable, "-S", "-E", "-c", code]
    return SupervisedProcess("child", command, config, failures_max=failures_max)


@asynccontextmanager
async def kept(made: SupervisedProcess) -> AsyncIterator[SupervisedProcess]:
    made.start()
    try:
        async with asyncio.timeout(90):
            yield made
    finally:
        await made.stop()


def gone(pid: str) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_process_is_ready_when_it_reports_ready() -> None:
    async def story() -> None:
        async with kept(process(LIVES)) as child:
            assert await child.ready() == str(child.pid)
            assert child.restarts == 0

    uvloop.run(story())


def test_a_killed_process_is_restarted() -> None:
    async def story() -> None:
        async with kept(process(LIVES)) as child:
            pid = await child.ready()
            for count in range(1, 4):
                os.kill(int(pid), signal.SIGKILL)
                before, pid = pid, await child.ready(restarts=count)
                assert pid != before
                assert child.restarts == count

    uvloop.run(story())


def test_a_process_that_was_ready_once_is_restarted_without_limit(tmp_path: Path) -> None:
    """Nine crashes in a row after the process was ready once."""
    runs = tmp_path / "runs"
    code = (
        f"runs = open({str(runs)!r}, 'ab'); runs.write(b'x'); runs.flush()\n"
        + CHILD
        + "if runs.tell() in range(2, 11): sys.exit(1)\n"
        + LIVES.removeprefix(CHILD)
    )

    async def story() -> None:
        async with kept(process(code, failures_max=1)) as child:
            first = await child.ready()
            os.kill(int(first), signal.SIGKILL)
            await child.ready(restarts=1)
            assert child.restarts == 10

    uvloop.run(story())


def test_a_process_that_never_becomes_ready_fails_the_start_with_its_own_sentence() -> None:
    code = CHILD + "line.send(b'failed The port 80 is in use.\\n'); sys.exit(2)"

    async def story() -> None:
        async with kept(process(code)) as child:
            with pytest.raises(NotReadyError, match=r"child does not start: The port 80 is in"):
                await child.ready()
            assert child.restarts == 2

    uvloop.run(story())


def test_a_process_that_waits_for_the_cluster_is_restarted_without_limit(tmp_path: Path) -> None:
    """The process reports four times that the cluster is not ready; the limit otherwise is two."""
    runs = tmp_path / "runs"
    code = (
        f"runs = open({str(runs)!r}, 'ab'); runs.write(b'x'); runs.flush()\n"
        + CHILD
        + "if runs.tell() < 5: sys.exit(os.EX_TEMPFAIL)\n"
        + LIVES.removeprefix(CHILD)
    )

    async def story() -> None:
        async with kept(process(code, failures_max=2)) as child:
            await child.ready()
            assert child.restarts == 4

    uvloop.run(story())


def test_the_end_of_a_ready_process_that_lost_data_is_reported() -> None:
    code = READY + "line.send(b'failed no copy is left\\n')\nsys.exit(os.EX_DATAERR)\n"

    async def story() -> None:
        async with kept(process(code)) as child:
            assert str(await child.wait_for_data_loss()) == "child does not start: no copy is left"
            await child.ready(restarts=1)

    uvloop.run(story())


def test_a_program_that_does_not_exist_is_reported_in_one_sentence() -> None:
    async def story() -> None:
        async with kept(SupervisedProcess("child", ["/no/such/program"], CONFIG)) as child:
            with pytest.raises(NotReadyError, match=r"child does not start: /no/such/program can"):
                await child.ready()

    uvloop.run(story())


def test_a_stop_sends_a_termination_request_before_a_kill() -> None:
    code = (
        CHILD
        + "signal.signal(signal.SIGTERM, lambda *_: (line.send(b'ready asked\\n'), sys.exit(0)))\n"
        + LIVES.removeprefix(CHILD)
    )

    async def story() -> None:
        async with kept(process(code, config=node_config(stop_timeout_s=60.0))) as child:
            pid = await child.ready()
            await child.stop()
            assert child.detail == "asked"
            assert gone(pid)
            with pytest.raises(NotReadyError, match="child was stopped"):
                await child.ready()

    uvloop.run(story())


def test_a_process_that_ignores_the_termination_request_is_killed() -> None:
    code = CHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + LIVES.removeprefix(CHILD)

    async def story() -> None:
        async with kept(process(code)) as child:
            pid = await child.ready()
            await child.stop()
            assert gone(pid)

    uvloop.run(story())


def test_stopping_ends_the_pause_before_a_restart() -> None:
    patient = node_config(restart_s_min=1000.0, restart_s_max=1000.0)

    async def story() -> None:
        async with kept(process(CHILD, config=patient)) as child:
            await until(lambda: child.pid is not None)
            await until(lambda: child.pid is None)
            await child.stop()

    uvloop.run(story())


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - only the kernel knows
        await asyncio.sleep(0)


def test_stopping_a_stopped_or_never_started_process_is_harmless() -> None:
    async def story() -> None:
        child = process(LIVES)
        await child.stop()
        async with kept(process(LIVES)) as child:
            await child.ready()
            await child.stop()
            await child.stop()

    uvloop.run(story())


def test_a_line_over_the_limit_is_ignored_and_later_lines_are_read() -> None:
    code = CHILD + "line.sendall(b'ready ' + b'x' * 100_000 + b'\\n')\n"

    async def story() -> None:
        async with kept(process(code + LIVES.removeprefix(CHILD))) as child:
            assert await child.ready() == str(child.pid)

    uvloop.run(story())


STALL_S = 1.5
SAYS_WHY = CHILD + "line.send(b'failed The port 80 is in use.\\n'); sys.exit(2)"


def test_the_last_line_of_a_process_is_read_although_the_supervisor_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = SupervisedProcess._listen

    async def late(self: SupervisedProcess, reader: asyncio.StreamReader) -> None:
        await asyncio.sleep(STALL_S)
        await real(self, reader)

    monkeypatch.setattr(SupervisedProcess, "_listen", late)

    async def story() -> None:
        async with kept(process(SAYS_WHY, failures_max=1)) as child:
            with pytest.raises(NotReadyError, match="The port 80 is in use"):
                await child.ready()

    uvloop.run(story())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_dead_process_is_gone_although_its_child_keeps_the_socket(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    code = CHILD + (
        "if os.fork() == 0:\n"
        "    line.recv(1); os._exit(0)\n"  # until the supervisor closes the socket
        "line.send(b'failed %d\\n' % os.getpid())\n"
        "os._exit(2)\n"
    )

    async def story() -> None:
        async with kept(process(code, failures_max=1)) as child:
            with pytest.raises(NotReadyError, match=r"does not start: \d+$"):
                await child.ready()

    run(story())


BEATS = (
    CHILD
    + """
import time
line.send(b'ready %d\\n' % os.getpid())
line.settimeout(0.02)
while True:
    try:
        line.send(b'heartbeat\\n')
        line.recv(1)
        break
    except TimeoutError:
        pass
"""
)
STARTS = node_config(
    restart_s_min=0.01, restart_s_max=0.02, stop_timeout_s=0.3, hang_s=0.5, start_timeout_s=2.0
)


def test_a_process_that_hangs_before_it_is_ready_is_killed_and_restarted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    code = (
        f"runs = open({str(runs)!r}, 'ab'); runs.write(b'x'); runs.flush()\n"
        + CHILD
        + "if runs.tell() < 2: line.recv(1)\n"
        + LIVES.removeprefix(CHILD).replace("line.recv(1)", "")
        + "import time\n"
        + "while True: line.send(b'heartbeat\\n'); time.sleep(0.05)\n"
    )

    async def story() -> None:
        async with kept(process(code, config=STARTS, failures_max=20)) as child:
            await child.ready()
            assert child.restarts >= 1, "more often, if a start took 2 s"

    uvloop.run(story())


def test_a_process_that_always_hangs_before_it_is_ready_fails_the_start() -> None:
    async def story() -> None:
        async with kept(process(CHILD + "line.recv(1)\n", config=STARTS, failures_max=1)) as child:
            with pytest.raises(NotReadyError, match=r"not ready within 2 s \(start_timeout_s\)"):
                await child.ready()

    uvloop.run(story())


HANGS = node_config(restart_s_min=0.01, restart_s_max=0.02, stop_timeout_s=0.3, hang_s=2.0)
"""A busy machine lets a process run once in 2 s."""


def test_a_ready_process_without_heartbeats_is_killed_and_restarted() -> None:
    async def story() -> None:
        async with kept(process(BEATS, config=HANGS)) as child:
            pid = int(await child.ready())
            os.kill(pid, signal.SIGSTOP)
            assert int(await child.ready(restarts=1)) != pid
            assert gone(str(pid))

    uvloop.run(story())


def test_a_pause_of_the_supervisor_does_not_count_as_missed_heartbeats() -> None:
    async def story() -> None:
        async with kept(process(BEATS, config=HANGS)) as child:
            pid = int(await child.ready())
            for _ in range(2):
                os.kill(pid, signal.SIGSTOP)  # as if the machine was paused
                time.sleep(1.5 * HANGS.processes.hang_s)  # noqa: ASYNC251 - this is what is tested
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(HANGS.processes.hang_s / 2)
            assert child.restarts == 0

    uvloop.run(story())


LISTENS = """
import os, pathlib, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    connection.send(b'ready %d\\n' % os.getpid())
"""


def test_a_process_of_an_earlier_supervisor_is_adopted_and_then_kept_running(
    tmp_path: Path,
) -> None:
    control = tmp_path / "child.control"
    command = [sys.executable, "-S", "-E", "-c", LISTENS.replace("\\\\", "\\"), str(control)]

    async def story() -> None:
        orphan = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert orphan.stdout is not None
        assert await orphan.stdout.readline() == b"up\n"
        made = SupervisedProcess(
            "child", [sys.executable, "-S", "-E", "-c", LIVES], CONFIG, control=control
        )
        async with kept(made) as child:
            assert await child.ready() == str(orphan.pid)
            assert child.adopted
            orphan.kill()
            await orphan.wait()
            assert await child.ready(restarts=1) == str(child.pid) != str(orphan.pid)
            assert not child.adopted

    uvloop.run(story())


def test_a_stopped_process_of_an_earlier_supervisor_is_replaced(tmp_path: Path) -> None:
    """The system accepts the connection for the stopped process, which never answers."""
    control = tmp_path / "child.control"
    command = [sys.executable, "-S", "-E", "-c", LISTENS.replace("\\\\", "\\"), str(control)]

    async def story() -> None:
        orphan = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert orphan.stdout is not None
        assert await orphan.stdout.readline() == b"up\n"
        orphan.send_signal(signal.SIGSTOP)
        made = SupervisedProcess(
            "child", [sys.executable, "-S", "-E", "-c", LIVES], HANGS, control=control
        )
        async with kept(made) as child:
            assert await child.ready() != str(orphan.pid)
            assert await orphan.wait() == -signal.SIGKILL

    uvloop.run(story())
