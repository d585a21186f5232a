"""The program that `./start` runs after packages are installed. It starts a platform, runs the
demos of the applications, then prints commands to try.

The platform and each demo are separate processes, started by the same commands that a user would
give. So the user sees the output of these commands. The platform's log lines go to a file, so that
they do not disturb the progress bars. A socket pair connects the platform to this process, so the
platform stops when this process ends, even by `kill -9`. Benchmarks start platforms with the same
functions.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console

from indilog.base.errors import ConfigError, IndilogError
from indilog.cli.one_sentence import OneSentenceCommand
from indilog.config import NodeConfig, config_from
from indilog.link.access import reach

HOST = "127.0.0.1"
READY_S_MAX = 180.0
STOP_S_MAX = 60.0
LOG_LINES_SHOWN = 12
_ROTATE_S = 10.0
_POLL_S = 0.1
ROOT = Path(__file__).resolve().parents[2]

DEFAULT_PORT = 8080
DEFAULT_DATA = ROOT / ".indilog"

_NEXT = """
[bold]IndiLog is up[/bold] on {url} with its data in {data}. Try:

{commands}
  indilog open --url {url}  # the deployed functions in a browser

README.md shows how to write a function of your own in five minutes.

(`indilog` is .venv/bin/indilog; run `source .venv/bin/activate` to type it like that.)
"""
APPLICATIONS = ("social", "travel", "media", "orders")
"""The applications, in the order of their demos."""
_WITH = {
    "social": (
        "indilog invoke social.profile user=1 --url {url}",
        """curl -H "$AUTH" --json '{{"user": "1"}}' {url}/functions/social/timeline""",
        """curl -H "$AUTH" '{url}/logs/social/records?limit=3'""",
    ),
    "travel": (
        'curl -H "$AUTH" --json \'{{"lat": 37.78, "lon": -122.41}}\' {url}/functions/travel/search',
    ),
    "media": ("""curl -H "$AUTH" --json '{{"title": "Movie 1"}}' {url}/functions/media/movie""",),
    "orders": (
        'curl -H "$AUTH" --json \'{{"customer": "customer 1"}}\' {url}/functions/orders/orders_of',
        "python -m functions.orders.shop --url {url}  # a page: order, and see the status live",
    ),
}
_AUTH = 'AUTH="Authorization: Bearer $(indilog token --url {url})"'
"""The option with the token in the printed curl commands."""
_WITHOUT = (
    "indilog log append greetings hello --url {url}",
    "indilog log read greetings --url {url}",
    "indilog deploy functions/social --url {url}",
)


class StartError(Exception):
    """The start failed. The message is one sentence, empty if the cause was already printed;
    `status` is the exit code.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class PlatformLog:
    """The output of one run of the platform; successive runs append to one file.

    Args:
        data: data directory, which has the log file.
        node: settings with the size limit of the file (`log_bytes_max`) and the number of kept
            files; None: the defaults.

    Raises:
        StartError: the directory cannot be used, or another `./start` uses it.
    """

    def __init__(self, data: Path, node: NodeConfig | None = None) -> None:
        self._node = node or NodeConfig()
        self.file = data / "platform.log"
        try:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.output = self.file.open("ab")
        except OSError as error:
            raise StartError(
                f"The data directory {data} cannot be used: {error.strerror}; choose another one "
                "with --data.",
                2,
            ) from None
        try:
            # The platform inherits the lock with its output, and holds it until it ends.
            fcntl.flock(self.output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.output.close()
            raise StartError(
                f"{data} is in use by another ./start; stop it, or choose another directory with "
                "--data.",
                2,
            ) from None
        self._begin = 0
        self.rotate()
        self._begin = self.file.stat().st_size

    def rotate(self) -> None:
        """Rotate the file if it is larger than `log_bytes_max`. Keep `log_files_kept` old files;
        `platform.log.1` is the newest of them.

        The platform keeps the file open, so it is copied, then truncated; lines written between
        these two steps are lost.
        """
        if self.file.stat().st_size <= self._node.processes.log_bytes_max:
            return
        for number in range(self._node.processes.log_files_kept - 1, 0, -1):
            if (old := self._kept(number)).exists():
                old.replace(self._kept(number + 1))
        shutil.copyfile(self.file, self._kept(1))
        os.truncate(self.file, 0)
        self._begin = 0

    def _kept(self, number: int) -> Path:
        return self.file.with_name(f"{self.file.name}.{number}")

    def reason(self, otherwise: str) -> str:
        """Return why this run ended: its error message if there is one, else its last lines and
        `otherwise`.
        """
        with self.file.open("rb") as written:
            written.seek(self._begin)
            lines = written.read().decode(errors="replace").splitlines()
        if lines and not lines[-1].startswith("{") and not any("Traceback" in n for n in lines):
            return lines[-1]
        return "\n".join([*lines[-LOG_LINES_SHOWN:], otherwise])


@contextmanager
def platform(log: PlatformLog, data: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `indilog up` while the block runs. After the block, give it time to stop cleanly."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, log.output as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "indilog", "up", "--data", str(data),
                    "--port", str(port), "--supervisor-fd", str(theirs.fileno()),
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal is for this process, which then stops the platform in
                # order.
                process_group=0,
            )  # fmt: skip
        try:
            yield process
        finally:
            stop(process)


def configured() -> NodeConfig:
    """Return the settings that the platform takes from the environment.

    Raises:
        StartError: the settings contradict each other, or one is unknown.
    """
    try:
        return config_from(None, os.environ).node
    except ConfigError as error:
        raise StartError(str(error), 2) from None


def check_port_free(port: int) -> None:
    """Raise if the port is in use, because another server there could be mistaken for this
    platform.

    Raises:
        StartError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise StartError(
                f"Port {port} is in use; is IndiLog up already? Give another one with --port.", 2
            ) from None


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; kill it after `STOP_S_MAX` seconds, or at a second Ctrl-C."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S_MAX)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: PlatformLog) -> None:
    """Return when the platform answers that it is ready.

    Raises:
        StartError: the process ended, or was not ready within `READY_S_MAX` seconds; the message
            says where to find the cause.
    """
    until = time.monotonic() + READY_S_MAX
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while time.monotonic() < until:
            if (status := process.poll()) is not None:
                raise StartError(log.reason("The platform did not start."), status or 1)
            if _is_ready(client, url):
                return
            time.sleep(_POLL_S)
    raise StartError(f"The platform was not ready after {READY_S_MAX:.0f} s; see {log.file}.")


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def run_step(name: str, *arguments: str) -> None:
    """Run one command of the project with its output shown; the command prints its own errors.

    Raises:
        StartError: the command failed.
    """
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=False)
    if done.returncode < 0:
        raise StartError(f"{name} was ended by signal {-done.returncode}.")
    if done.returncode:
        raise StartError("", done.returncode)


def demonstrate(url: str, seconds: float, inputs: Mapping[str, Sequence[str]]) -> None:
    """Deploy each application and run its demo; `inputs` has further options by application.

    Raises:
        StartError: a deployment or a demo failed.
    """
    for app in APPLICATIONS:
        run_step(f"Deploying {app}", "indilog", "deploy", f"functions/{app}", "--url", url)
        options = ("--url", url, "--seconds", str(seconds), *inputs.get(app, ()))
        run_step(f"The demo of {app}", f"functions.{app}.demo", *options)


def inputs_of(graph: Path | None, travel_data: Path | None) -> dict[str, Sequence[str]]:
    """Return the user's input files as further options of the demos, by application.

    The files are checked before anything is started, so that a mistake is reported at once.

    Raises:
        StartError: a demo cannot read its file; the cause was printed.
    """
    inputs: dict[str, Sequence[str]] = {}
    if graph is not None:
        run_step("Reading the graph", "functions.social.graph", str(graph.absolute()))
        inputs["social"] = ("--graph", str(graph.absolute()))
    if travel_data is not None:
        run_step("Reading the hotels", "functions.travel.hotels", str(travel_data.absolute()))
        inputs["travel"] = ("--hotels", str(travel_data.absolute()))
    return inputs


def query_with_spark(data: Path) -> None:
    """Run one query with Spark over the demos' records, or print what Spark needs.

    Raises:
        StartError: the query failed; its error was printed.
    """
    from indilog_pipeline.session import why_not

    if reason := why_not():
        sys.stderr.write(f"No query with Spark: {reason}\n")
    else:
        run_step("The query with Spark", "indilog_pipeline.first_query", "--data", str(data))


def what_next(url: str, data: Path) -> str:
    """Return commands to try on the platform at `url`, only for applications that are deployed."""
    try:
        with httpx.Client(**reach(url).for_httpx, timeout=10.0) as client:
            there = [app["name"] for app in client.get(f"{url}/apps").json()["apps"]]
    except (httpx.HTTPError, IndilogError):
        there = []  # the next step reports the problem
    of_apps = [command for app in APPLICATIONS if app in there for command in _WITH[app]]
    commands = ["indilog status --url {url}", *([_AUTH, *of_apps] if of_apps else _WITHOUT)]
    lines = "\n".join(f"  {command.format(url=url)}" for command in commands)
    return _NEXT.format(url=url, data=data, commands=lines)


def why_it_stops(*, asked: bool, data: Path, port: int) -> str:
    """Return why the platform stops now, and the command that keeps it running with the same data
    and port.
    """
    command = "./start"
    if data != DEFAULT_DATA:
        command += f" --data {shlex.quote(str(data))}"
    if port != DEFAULT_PORT:
        command += f" --port {port}"
    reason = "It stops now, as --no-stay asks" if asked else "No terminal is watching: it stops now"
    return f"{reason}. `{command} --no-demo --stay` starts it again with its data and keeps it up."


def stay(process: subprocess.Popen[bytes], log: PlatformLog) -> None:
    """Wait until Ctrl-C or SIGTERM.

    Raises:
        StartError: the platform ended by itself.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(_ROTATE_S)
            break
        log.rotate()
    raise StartError(log.reason("The platform ended by itself."), status or 1)


def start(
    *,
    setup_only: Annotated[
        bool, typer.Option("--setup-only", help="Set everything up, start nothing.")
    ] = False,
    no_demo: Annotated[
        bool, typer.Option("--no-demo", help="Start the platform, leave the demos out.")
    ] = False,
    _spark: Annotated[bool, typer.Option("--spark", help="Install Java and PySpark.")] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long the load of each demo runs.")
    ] = 5.0,
    graph: Annotated[
        Path | None,
        typer.Option(help="Your social graph: two numbers a line; default: generated."),
    ] = None,
    travel_data: Annotated[
        Path | None,
        typer.Option(help="Directory with your hotels.json; default: generated hotels."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="HTTP port on this machine.")
    ] = DEFAULT_PORT,
    data: Annotated[Path, typer.Option(help="Where records are kept.")] = DEFAULT_DATA,
    stay_up: Annotated[
        bool | None,
        typer.Option(
            "--stay/--no-stay",
            help="Stay up after the demos; by default only when a terminal is watching.",
        ),
    ] = None,
) -> None:
    """Start IndiLog, show its applications and what to try next, and run until Ctrl-C."""
    if setup_only:
        return
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    url, data = f"http://{HOST}:{port}", data.resolve()
    stays = sys.stdout.isatty() if stay_up is None else stay_up
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        check_port_free(port)
        inputs = {} if no_demo else inputs_of(graph, travel_data)
        log = PlatformLog(data, configured())
        with platform(log, data, port) as process:
            wait_ready(process, url, log)
            if not no_demo:
                demonstrate(url, seconds, inputs)
                query_with_spark(data)
            console.print(what_next(url, data))
            if stays:
                console.print("Ctrl-C stops it.")
                stay(process, log)
            console.print(why_it_stops(asked=stay_up is False, data=data, port=port))
    except KeyboardInterrupt:
        console.print("Stopped.")
    except StartError as error:
        sys.stderr.write(f"{error}\n" if str(error) else "")
        raise typer.Exit(error.status) from None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run `./start`."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(cls=OneSentenceCommand)(start)
    command(prog_name="./start")


if __name__ == "__main__":
    main()
