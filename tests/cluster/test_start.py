"""`./start` as a process: it runs the demos, stops in order, and recovers its data."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.support.servers import free_port
from indilog.cli.start import APPLICATIONS
from tests.cluster.platform_process import accept_interrupts
from tests.support.clients import token_headers

ROOT = Path(__file__).resolve().parents[2]
ENDS_S_MAX = 300
pytestmark = pytest.mark.cluster


@contextmanager
def started(data: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `./start`; kill it at the end of the block, also of a failed test."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "indilog.cli.start",
            "--data", data, "--port", str(port), *arguments,
        ],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # `tests/spark` has the query. Each worker loads all applications.
        env=os.environ | {"JAVA_HOME": "/nowhere", "INDILOG_NODE_WORKERS": "1"},
        preexec_fn=accept_interrupts,  # noqa: PLW1509 - it calls nothing that takes a lock
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def shown_until(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a line with `text` in the output of the process; fail if the process ends first."""
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if text in line:
            return
    pytest.fail(f"it ended without saying {text!r}: {''.join(shown)}")


@pytest.mark.repeated("tests/cluster/applications/test_applications.py")
@pytest.mark.timeout(900)  # four applications, on a machine that runs other tests, too
def test_a_demo_start_ends_by_itself_and_a_second_start_finds_its_data(tmp_path: Path) -> None:
    data, port = tmp_path / "data", free_port()
    graph = tmp_path / "graph"
    graph.write_text("".join(f"{a} {b}\n" for a in range(12) for b in range(a + 1, 12)))
    with started(data, port, "--seconds", "0.5", "--graph", str(graph)) as first:
        shown, _ = first.communicate(timeout=ENDS_S_MAX)
    assert first.returncode == 0, shown
    assert shown.count("Checked") == len(APPLICATIONS)
    assert "No query with Spark: " in shown
    assert "Try:" in shown

    with started(data, port, "--no-demo", "--stay") as second:
        shown_until(second, "Ctrl-C stops it")
        url = f"http://127.0.0.1:{port}"
        profile = httpx.post(
            f"{url}/functions/social/profile",
            json={"user": "1"},
            headers=token_headers(url),
            timeout=120,
        )
        second.send_signal(signal.SIGINT)
        shown, _ = second.communicate(timeout=ENDS_S_MAX)
    assert profile.json()["followers"] == 11
    assert second.returncode == 0, shown
    assert "Stopped" in shown


def test_a_port_in_use_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(tmp_path / "data", port, "--no-demo") as process:
            shown, _ = process.communicate(timeout=ENDS_S_MAX)
    assert process.returncode == 2, shown
    assert shown.startswith(f"Port {port} is in use;")
    assert not (tmp_path / "data").exists()


def test_a_killed_start_ends_its_platform_and_a_concurrent_start_is_refused(
    tmp_path: Path,
) -> None:
    data, port = tmp_path / "data", free_port()
    with started(data, port, "--no-demo", "--stay") as first:
        shown_until(first, "Ctrl-C stops it")
        with started(data, free_port(), "--no-demo") as second:
            shown, _ = second.communicate(timeout=ENDS_S_MAX)
        assert second.returncode == 2
        assert shown == (
            f"{data} is in use by another ./start; stop it, or choose another directory with "
            "--data.\n"
        )
        first.kill()
    until = time.monotonic() + ENDS_S_MAX
    with (data / "platform.log").open() as log:
        while True:  # the platform and its processes hold the lock until they have ended
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < until, "the platform outlived ./start"
                time.sleep(0.05)
        assert "Finished server process" in log.read(), "the platform stopped in order"
