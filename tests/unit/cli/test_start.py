"""Claims about `./start` (`indilog.cli.start`) that need no platform."""

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


def test_its_help_speaks_of_the_command_that_a_person_typed(
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
    told = capsys.readouterr().err
    assert told.startswith("Invalid value for '--port': ")
    assert told.endswith("see `./start --help`.\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--port", "0"], ["--bogus"]])
def test_a_wrong_option_starts_nothing(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PlatformLog]:
    """The log of a run of the platform, in a file where an earlier run has written."""
    (tmp_path / "platform.log").write_text("An earlier run did not find its port.\n")
    made = PlatformLog(tmp_path, NodeConfig())
    yield made
    made.output.close()


def reason_of(log: PlatformLog, *lines: str) -> StartError:
    """Return what a person is told when the platform has written `lines` and ended with 2."""
    log.output.write("".join(f"{line}\n" for line in lines).encode())
    log.output.flush()
    with child("import sys; sys.exit(2)") as process:
        process.wait(30)
        with pytest.raises(StartError) as caught:
            wait_ready(process, NOBODY, log)
    assert caught.value.status == 2
    return caught.value


def test_a_platform_that_ends_says_why_in_its_own_sentence_alone(log: PlatformLog) -> None:
    told = reason_of(log, '{"event": "journal recovered"}', "The directory is in use.")
    assert str(told) == "The directory is in use."


def test_without_a_sentence_only_the_end_of_this_run_is_shown(log: PlatformLog) -> None:
    told = str(reason_of(log, *(f'{{"event": "{n}"}}' for n in range(100))))
    assert '"99"' in told
    assert '"50"' not in told
    assert told.endswith("The platform did not start.")


def test_a_traceback_is_shown_whole(log: PlatformLog) -> None:
    told = str(reason_of(log, "Traceback (most recent call last):", "  File x", "KeyError: 1"))
    assert "File x" in told
    assert "earlier run" not in told


def test_a_second_start_on_the_same_directory_is_one_sentence(log: PlatformLog) -> None:
    with pytest.raises(StartError, match="in use by another") as caught:
        PlatformLog(log.file.parent, NodeConfig())
    assert caught.value.status == 2


def test_a_file_in_place_of_the_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StartError, match="file cannot be used: File exists; choose another"):
        PlatformLog(tmp_path / "file", NodeConfig())


def test_a_log_that_has_grown_large_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "platform.log").write_text("x" * 11)
    PlatformLog(tmp_path, node_config(log_bytes_max=10)).output.close()
    assert (tmp_path / "platform.log").read_text() == ""


def test_a_log_that_grows_while_the_platform_runs_is_begun_anew_and_few_old_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform writes into the same file all the time, at its end."""
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
def test_only_what_is_deployed_is_suggested(
    monkeypatch: pytest.MonkeyPatch, apps: list[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"apps": [{"name": name} for name in apps]})

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: real(transport=httpx.MockTransport(answer)))
    shown = what_next(NOBODY, Path("/data"))
    for app in start.APPLICATIONS:
        assert (f"{NOBODY}/functions/{app}/" in shown) is (app in apps)
    assert ("indilog deploy functions/social" in shown) is (not apps)
    assert NOBODY in shown


def test_why_it_stops_repeats_the_options_that_were_given() -> None:
    told = why_it_stops(asked=False, data=start.DEFAULT_DATA, port=start.DEFAULT_PORT)
    assert "No terminal" in told
    assert "`./start --no-demo --stay`" in told
    told = why_it_stops(asked=True, data=Path("/a b"), port=9000)
    assert "terminal" not in told
    assert "`./start --data '/a b' --port 9000 --no-demo --stay`" in told


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
    told = capfd.readouterr().err
    assert told == f"{tmp_path}/hotels.json cannot be read: No such file or directory.\n"
    assert not (tmp_path / "data").exists()


def test_a_platform_that_takes_too_long_is_given_up(
    log: PlatformLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "READY_S_MAX", 0.0)
    with child(WAITING) as process:
        with pytest.raises(StartError, match="not ready"):
            wait_ready(process, NOBODY, log)
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
