"""Runs benchmarks: closed-loop callers, interleaved rounds, medians, raw samples.

The speed of a shared machine varies. So all sides run interleaved, round by round in alternating
order. A ratio is taken within a round, and the median of the rounds is quoted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Never, TypeAlias

import uvloop
from rich.console import Console
from rich.table import Table

from bench.profile import profiled

Main: TypeAlias = Coroutine[Any, Any, None]
Operation: TypeAlias = Callable[[int], Awaitable[object]]
"""One operation of the caller with that number."""

ROOT = Path(__file__).resolve().parents[2]
CALLERS = (1, 64, 256)
LATENCIES_KEPT_MAX = 20_000
"""Latencies of one round in the JSON file, at most; beyond it, every n-th one is kept."""
_PACKAGES = (
    "uvloop", "redis", "hiredis", "valkey-glide", "nats-py", "asyncpg", "msgspec", "pyzmq",
    "fastapi", "uvicorn",
)  # fmt: skip


class Round(NamedTuple):
    """One closed-loop run."""

    operations: int
    seconds: float
    cpu_s: float
    """Processor seconds of this process during the round."""
    latencies_s: array[float]

    @property
    def per_second(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds

    def quantile(self, share: float) -> float:
        """Return a latency quantile, in seconds; infinite if there was no answer in time."""
        if not self.latencies_s:
            return math.inf
        ordered = sorted(self.latencies_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def closed_loop(
    operation: Operation, *, callers: int, seconds: float, patience_s: float | None = None
) -> Round:
    """Run `callers` tasks for `seconds`. Each task calls `operation` repeatedly, and at least
    once, because a round without an operation would have no figures.

    With `patience_s`, answers are awaited until that many seconds after the end; later answers do
    not count.
    """
    latencies = array("d")
    clock, note = time.perf_counter, latencies.append
    start, cpu = clock(), time.process_time()
    end = start + seconds

    async def caller(number: int) -> None:
        now, over = clock(), False
        while not over:
            await operation(number)
            done = clock()
            note(done - now)
            now, over = done, done >= end

    calling = asyncio.gather(*map(caller, range(callers)))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(calling, None if patience_s is None else seconds + patience_s)
    return Round(len(latencies), clock() - start, time.process_time() - cpu, latencies)


Rounds: TypeAlias = dict[str, list[Round]]
"""The rounds of each side of a comparison."""


async def interleave(
    sides: Mapping[str, Operation], *, callers: int, seconds: float, rounds: int
) -> Rounds:
    """Run every side `rounds` times, interleaved, each after a short warm-up that does not count.

    The order is reversed with every round, so that no side always runs after the same other side.
    """
    found: Rounds = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            await closed_loop(sides[name], callers=callers, seconds=min(0.2, seconds / 4))
            gc.collect()
            found[name].append(await closed_loop(sides[name], callers=callers, seconds=seconds))
        order.reverse()
    return found


def median_of(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """Return the median of a figure over the rounds."""
    return median(figure(one) for one in rounds)


def ratio_of(
    rounds: Sequence[Round], base: Sequence[Round], figure: Callable[[Round], float]
) -> float:
    """Return the median over rounds of `figure`, each as a ratio to the base in the same round."""
    return median(figure(one) / figure(other) for one, other in zip(rounds, base, strict=True))


# --- what was asked for, what it ran on, what came out


def arguments(about: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """Read the command line: `--seconds`, `--rounds`, `--callers`, `--json`, `--profile`, and
    `more`.

    Args:
        about: the docstring of the benchmark; `--help` shows its first paragraph.
        more: further options (`processes`), each with its keyword arguments of `add_argument`; an
            option of the same name replaces one of the five.
    """
    paragraph = (about or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=paragraph, conflict_handler="resolve")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side")
    parser.add_argument("--callers", type=int, nargs="+", default=list(CALLERS))
    parser.add_argument("--json", type=Path, default=None, help="write raw samples there")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    for name, option in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser.parse_args()


class Report:
    """Collects the results of a benchmark: prints tables at once, writes all results at the end."""

    def __init__(self, title: str, asked: argparse.Namespace, **configuration: object) -> None:
        self._console = Console(width=None if Console().is_terminal else 180)
        self._json: Path | None = asked.json
        self._found: dict[str, Any] = {
            "title": title,
            "machine": machine(),
            "commit": commit(),
            "packages": packages(),
            "asked": {k: str(v) for k, v in vars(asked).items()},
            "configuration": configuration,
            "samples": {},
        }
        header = {k: v for k, v in self._found.items() if k != "samples"}
        for name, value in header.items():
            shown = (
                value if isinstance(value, str) else ", ".join(f"{k} {v}" for k, v in value.items())
            )
            self._console.print(f"{name:>14}  {shown}", highlight=False, soft_wrap=True)

    def add(self, name: str, found: Rounds) -> None:
        """Keep the raw samples of one comparison."""
        self._found["samples"][name] = {
            side: [_raw(one) for one in rounds] for side, rounds in found.items()
        }

    def keep(self, name: str, value: object) -> None:
        """Keep one further figure."""
        self._found.setdefault("figures", {})[name] = value

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def write(self) -> None:
        """Write all results to the requested file."""
        if self._json is not None:
            self._json.write_text(json.dumps(self._found, indent=1))


def _raw(one: Round) -> dict[str, Any]:
    every = -(-len(one.latencies_s) // LATENCIES_KEPT_MAX) or 1
    return {
        "operations": one.operations,
        "seconds": round(one.seconds, 6),
        "cpu_s": round(one.cpu_s, 6),
        "latency_every": every,
        "latencies_us": [round(value * 1e6) for value in one.latencies_s[::every]],
    }


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def latency(value_s: float) -> str:
    """Return a latency as text with about three digits."""
    if value_s < 1e-4:
        return f"{value_s * 1e6:.1f} µs"
    return f"{value_s * 1e3:.2f} ms" if value_s < 1 else f"{value_s:.2f} s"


def figures_of(rounds: Sequence[Round]) -> tuple[str, str, str, str]:
    """Return operations/s, p50, p99 and processor time per operation, medians over the rounds."""
    return (
        f"{median_of(rounds, lambda r: r.per_second):,.0f}",
        latency(median_of(rounds, lambda r: r.quantile(0.5))),
        latency(median_of(rounds, lambda r: r.quantile(0.99))),
        f"{median_of(rounds, lambda r: r.cpu_s / max(r.operations, 1)) * 1e6:.1f} µs",
    )


def machine() -> dict[str, str]:
    """Return a description of the machine and the software."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def commit() -> str:
    """Return the current commit, and whether files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def packages() -> dict[str, str]:
    """Return the versions of the packages that affect results."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def command(
    main: Callable[[argparse.Namespace], Main], about: str | None, **more: dict[str, Any]
) -> None:
    """Run a benchmark with the options of the command line; see `arguments`."""
    run(main, arguments(about, **more))


def run(main: Callable[[argparse.Namespace], Main], asked: argparse.Namespace) -> None:
    """Run a benchmark on uvloop, which every side in this process uses."""
    with ended_in_order(), profiled(wanted=asked.profile):
        uvloop.run(main(asked))


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that its processes are ended and its temporary
    directories removed. A second SIGTERM is ignored.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: object) -> Never:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
