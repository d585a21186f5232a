"""Claims about `./start` (`indilog.cli.start`) that need no platform."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from indilog.cli import start
from indilog.cli.start import StartError, log_file, stop, wait_ready

NOBODY = "http://127.0.0.1:9"
"""Nothing listens on the discard port."""
WAITING = "import signal; print(1, flush=True); signal.pause()"

app = Typer()
app.command()(start.start)


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python code in a process; the block begins when it has printed something, or ended."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_setup_only_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "platform", None)
    assert CliRunner().invoke(app, ["--setup-only"]).exit_code == 0


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--port", "0"], ["--graph", "/no/such/file"], ["--bogus"]]
)
def test_a_wrong_option_starts_nothing(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_platform_that_ends_says_why_with_its_own_status(tmp_path: Path) -> None:
    log = log_file(tmp_path)
    log.write_text("Port 8080 is in use; give another one with --port.\n")
    with child("import sys; sys.exit(2)") as process:
        process.wait(30)
        with pytest.raises(StartError, match="Port 8080 is in use") as caught:
            wait_ready(process, NOBODY, log)
    assert caught.value.status == 2


def test_only_the_end_of_the_log_is_shown(tmp_path: Path) -> None:
    log = log_file(tmp_path)
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    with child("") as process:
        process.wait(30)
        with pytest.raises(StartError) as caught:
            wait_ready(process, NOBODY, log)
    assert "line 99" in str(caught.value)
    assert "line 50" not in str(caught.value)
    assert caught.value.status == 1


def test_a_platform_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "READY_S_MAX", 0.0)
    with child(WAITING) as process:
        with pytest.raises(StartError, match="not ready"):
            wait_ready(process, NOBODY, log_file(tmp_path))
        stop(process)


def test_stopping_asks_before_it_kills() -> None:
    with child(WAITING) as process:
        stop(process)
        assert process.returncode == -signal.SIGTERM


def test_what_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STOP_S_MAX", 0.0)
    with child(
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"
    ) as process:
        stop(process)
        assert process.returncode == -signal.SIGKILL
