"""What `./start` does once packages are there: platform up, demo on real input, then what to try
next (issue 1, "The main job").

The platform runs as a process of its own, exactly as `indilog up` would, and so does the demo: what
a person sees here is what they get by typing the commands one after the other. The platform's log
lines go to a file, so that they do not run through the progress bar.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console

HOST = "127.0.0.1"
READY_S_MAX = 60.0
STOP_S_MAX = 20.0
LOG_LINES_SHOWN = 12
LOG_BYTES_MAX = 16 * 1024 * 1024
_POLL_S = 0.1
ROOT = Path(__file__).resolve().parents[2]

_NEXT = """
[bold]IndiLog is up[/bold] on {url} with its data in {data}. Try:

  indilog status --url {url}
  indilog invoke social.profile user=1 --url {url}
  curl -X POST {url}/functions/social/timeline -d '{{"user": "1"}}'
  curl '{url}/logs/social/records?limit=3'
  {url}/docs  lists the deployed functions; README.md has a function of your own in five minutes.

(`indilog` is .venv/bin/indilog; run `source .venv/bin/activate` to type it like that.)
"""


class StartError(Exception):
    """The start went wrong; the message is one sentence, `status` the exit code."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def platform(data: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `indilog up` until the block is left; it gets the time to stop cleanly."""
    log = log_file(data)
    log.parent.mkdir(parents=True, exist_ok=True)
    grown = log.exists() and log.stat().st_size > LOG_BYTES_MAX
    with log.open("wb" if grown else "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "indilog", "up", "--data", str(data), "--port", str(port)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is for this process, which then stops the platform in order.
            process_group=0,
        )
    try:
        yield process
    finally:
        stop(process)


def check_port_free(port: int) -> None:
    """Refuse a port that is taken: whoever answers there could be mistaken for our platform.

    Raises:
        StartError: it is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise StartError(
                f"Port {port} is in use; is IndiLog up already? Give another one with --port.", 2
            ) from None


def log_file(data: Path) -> Path:
    """Return where the platform's log lines go: into its data directory."""
    return data / "platform.log"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; end it when it takes over `STOP_S_MAX`, or at a second Ctrl-C."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S_MAX)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the platform answers that it is ready.

    Raises:
        StartError: it ended before, or took longer than `READY_S_MAX`; says where the reason is.
    """
    until = time.monotonic() + READY_S_MAX
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while time.monotonic() < until:
            if (status := process.poll()) is not None:
                raise StartError(f"{_last_lines(log)}\nThe platform did not start.", status or 1)
            if _is_ready(client, url):
                return
            time.sleep(_POLL_S)
    raise StartError(f"The platform was not ready after {READY_S_MAX:.0f} s; see {log}.")


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def run_step(name: str, *arguments: str) -> None:
    """Run one command of the project in front of the person.

    Raises:
        StartError: it failed.
    """
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise StartError(f"{name} failed; see the message above.", done.returncode)


def demonstrate(url: str, seconds: float, graph: Path | None) -> None:
    """Deploy the social network and run the demo on it.

    Raises:
        StartError: one of them failed.
    """
    run_step("Deploying functions/social", "indilog", "deploy", "functions/social", "--url", url)
    chosen = [] if graph is None else ["--graph", str(graph.resolve())]
    run_step(
        "The demo", "functions.social.demo", "--url", url, "--seconds", str(seconds), *chosen
    )  # fmt: skip


def stay(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until Ctrl-C or SIGTERM.

    Raises:
        StartError: the platform ended by itself.
    """
    status = process.wait()
    raise StartError(f"{_last_lines(log)}\nThe platform ended by itself.", status or 1)


def start(
    *,
    setup_only: Annotated[
        bool, typer.Option("--setup-only", help="Set everything up, start nothing.")
    ] = False,
    no_demo: Annotated[
        bool, typer.Option("--no-demo", help="Start the platform, leave the demo out.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the demo's load runs.")] = 10.0,
    graph: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Edges, two numbers a line; else bundled."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port on this machine.")] = 8080,
    data: Annotated[Path, typer.Option(help="Where records are kept.")] = ROOT / ".indilog",
    stay_up: Annotated[
        bool | None,
        typer.Option(
            "--stay/--no-stay",
            help="Stay up after the demo; by default only when a terminal is watching.",
        ),
    ] = None,
) -> None:
    """Start IndiLog, run the demo on it, say what to try next, stay up until Ctrl-C."""
    if setup_only:
        return
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    url, data = f"http://{HOST}:{port}", data.resolve()
    stays = sys.stdout.isatty() if stay_up is None else stay_up
    console = Console(stderr=True)
    try:
        check_port_free(port)
        with platform(data, port) as process:
            wait_ready(process, url, log_file(data))
            if not no_demo:
                demonstrate(url, seconds, graph)
            console.print(_NEXT.format(url=url, data=data), highlight=False, soft_wrap=True)
            if stays:
                console.print("Ctrl-C stops it.")
                stay(process, log_file(data))
            console.print(
                "No terminal is watching, so it stops now; ./start --stay keeps it up, and "
                "./start --no-demo finds its data again."
            )
    except KeyboardInterrupt:
        console.print("Stopped.")
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(error.status) from None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run `./start`."""
    typer.run(start)


if __name__ == "__main__":
    main()
