"""`./start` (`indilog.cli.start`) without a platform."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer import Typer
from typer.testing import CliRunner

from indilog.cli import start
from indilog.cli.start import PlatformLog, StartError, stop, wait_ready, what_next, why_it_stops
from indilog.config import NodeConfig, node_config

UNREACHABLE = "http://127.0.0.1:9"
"""No process listens on the discard port."""
WAITING = "import signal; print(1, flush=True); signal.pause()"

app = Typer()
app.command()(start.start)


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python code in a process; the block begins after its first output or its end."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_setup_only_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "platform", None)
    assert CliRunner().invoke(app, ["--setup-only"]).exit_code == 0


def test_the_help_names_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["start.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        start.main()
    assert "Usage: ./start" in capsys.readouterr().out


def test_a_wrong_option_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["start.py", "--port", "abc"])
    with pytest.raises(SystemExit, match="2"):
        start.main()
    output = capsys.readouterr().err
    assert output.startswith("Invalid value for '--port': ")
    assert output.endswith("see `./start --help`.\n")
    assert output.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--port", "0"], ["--bogus"]])
def test_a_wrong_option_starts_nothing(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PlatformLog]:
    """The log file of a run of the platform, to which an earlier run has written."""
    (tmp_path / "platform.log").write_text("An earlier run did not find its port.\n")
    made = PlatformLog(tmp_path, NodeConfig())
    yield made
    made.output.close()


def reason_of(log: PlatformLog, *lines: str) -> StartError:
    """Return the message for a platform that logged `lines` and ended with exit code 2."""
    log.output.write("".join(f"{line}\n" for line in lines).encode())
    log.output.flush()
    with child("import sys; sys.exit(2)") as process:
        process.wait(30)
        with pytest.raises(StartError) as caught:
            wait_ready(process, UNREACHABLE, log)
    assert caught.value.status == 2
    return caught.value


def test_the_end_of_a_platform_is_reported_with_its_own_sentence_alone(log: PlatformLog) -> None:
    output = reason_of(log, '{"event": "journal recovered"}', "The directory is in use.")
    assert str(output) == "The directory is in use."


def test_without_a_sentence_only_the_last_lines_of_this_run_are_shown(log: PlatformLog) -> None:
    output = str(reason_of(log, *(f'{{"event": "{n}"}}' for n in range(100))))
    assert '"99"' in output
    assert '"50"' not in output
    assert output.endswith("The platform did not start.")


def test_a_traceback_is_shown_in_full(log: PlatformLog) -> None:
    output = str(reason_of(log, "Traceback (most recent call last):", "  File x", "KeyError: 1"))
    assert "File x" in output
    assert "earlier run" not in output


def test_a_second_start_on_the_same_directory_is_one_sentence(log: PlatformLog) -> None:
    with pytest.raises(StartError, match="in use by another") as caught:
        PlatformLog(log.file.parent, NodeConfig())
    assert caught.value.status == 2


def test_a_file_in_place_of_the_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StartError, match="file cannot be used: File exists; choose another"):
        PlatformLog(tmp_path / "file", NodeConfig())


def test_a_large_log_file_is_rotated_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "platform.log").write_text("x" * 11)
    PlatformLog(tmp_path, node_config(log_bytes_max=10)).output.close()
    assert (tmp_path / "platform.log").read_text() == ""


def test_a_log_file_is_rotated_while_the_platform_runs_and_few_old_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform appends to the same file throughout."""
    monkeypatch.setattr(start, "_ROTATE_S", 0.01)
    log = PlatformLog(tmp_path, node_config(log_bytes_max=100, log_files_kept=2))
    writes = (
        "import sys, pathlib\n"
        "for n in range(5):\n"
        "    print(str(n) * 101, flush=True)\n"
        "    while pathlib.Path(sys.argv[1]).stat().st_size > 100: pass\n"
        "print('Ended.'); sys.exit(3)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", writes, str(log.file)], stdout=log.output, stderr=subprocess.STDOUT
    )
    with pytest.raises(StartError, match="Ended") as caught:
        start.stay(process, log)
    log.output.close()
    assert caught.value.status == 3
    assert log.file.read_text() == "Ended.\n"
    kept = sorted(tmp_path.glob("platform.log.*"))
    assert [path.name for path in kept] == ["platform.log.1", "platform.log.2"]
    assert [path.read_text()[0] for path in kept] == ["4", "3"]


@pytest.mark.parametrize("apps", [["social"], ["media", "travel"], ["travel", "other"], []])
def test_only_missing_applications_are_suggested(
    monkeypatch: pytest.MonkeyPatch, apps: list[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"apps": [{"name": name} for name in apps]})

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: real(transport=httpx.MockTransport(answer)))
    shown = what_next(UNREACHABLE, Path("/data"))
    for app in start.APPLICATIONS:
        assert (f"{UNREACHABLE}/functions/{app}/" in shown) is (app in apps)
    assert ("indilog deploy functions/social" in shown) is (not apps)
    assert UNREACHABLE in shown


def test_the_stop_message_repeats_the_given_options() -> None:
    output = why_it_stops(asked=False, data=start.DEFAULT_DATA, port=start.DEFAULT_PORT)
    assert "No terminal" in output
    assert "`./start --no-demo --stay`" in output
    output = why_it_stops(asked=True, data=Path("/a b"), port=9000)
    assert "terminal" not in output
    assert "`./start --data '/a b' --port 9000 --no-demo --stay`" in output


def test_a_bad_graph_is_one_sentence_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "platform", None)
    monkeypatch.setattr(start, "check_port_free", lambda _: None)
    graph = tmp_path / "graph"
    graph.write_text("1 x\n")
    arguments = ["--data", str(tmp_path / "data"), "--graph", str(graph)]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert capfd.readouterr().err == "graph, line 1: two numbers are expected, not '1 x'.\n"
    assert not (tmp_path / "data").exists()


def test_bad_hotels_are_one_sentence_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "platform", None)
    monkeypatch.setattr(start, "check_port_free", lambda _: None)
    arguments = ["--data", str(tmp_path / "data"), "--travel-data", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    output = capfd.readouterr().err
    assert output == f"{tmp_path}/hotels.json cannot be read: No such file or directory.\n"
    assert not (tmp_path / "data").exists()


def test_a_platform_that_takes_too_long_fails_the_start(
    log: PlatformLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "READY_S_MAX", 0.0)
    with child(WAITING) as process:
        with pytest.raises(StartError, match="not ready"):
            wait_ready(process, UNREACHABLE, log)
        stop(process)


def test_a_stop_sends_a_termination_request_before_a_kill() -> None:
    with child(WAITING) as process:
        stop(process)
        assert process.returncode == -signal.SIGTERM


def test_a_process_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STOP_S_MAX", 0.0)
    with child(
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"
    ) as process:
        stop(process)
        assert process.returncode == -signal.SIGKILL
