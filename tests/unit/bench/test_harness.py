"""How benchmarks measure (`bench.support.harness`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from bench.support.harness import (
    LATENCIES_KEPT_MAX,
    Report,
    Round,
    closed_loop,
    interleave,
    latency,
    median_of,
    ratio_of,
)


def round_of(operations: int, seconds: float = 1.0) -> Round:
    return Round(operations, seconds, 0.5, array("d", [seconds / operations] * operations))


def test_a_ratio_is_taken_within_a_round() -> None:
    # The machine is twice as fast in the second round; side and base are equally fast.
    side = [round_of(100), round_of(200), round_of(300)]
    base = [round_of(100), round_of(200), round_of(150)]
    assert ratio_of(side, base, lambda r: r.per_second) == 1.0


def test_the_median_is_quoted_and_not_the_mean() -> None:
    assert median_of([round_of(1), round_of(2), round_of(1000)], lambda r: r.per_second) == 2


def test_a_quantile_is_one_of_the_samples() -> None:
    one = Round(4, 1.0, 0.0, array("d", [0.4, 0.1, 0.3, 0.2]))
    assert (one.quantile(0.5), one.quantile(0.99), one.quantile(0.0)) == (0.3, 0.4, 0.1)


@pytest.mark.asyncio
async def test_each_caller_has_one_operation_outstanding() -> None:
    running = [0] * 3
    most = 0

    async def operation(caller: int) -> None:
        nonlocal most
        running[caller] += 1
        assert running[caller] == 1
        most = max(most, sum(running))
        await asyncio.sleep(0)
        running[caller] -= 1

    one = await closed_loop(operation, callers=3, seconds=0.02)
    assert most == 3
    assert one.operations == len(one.latencies_s) >= 3


@pytest.mark.asyncio
async def test_a_round_has_an_operation_of_each_caller_also_on_a_slow_machine() -> None:
    async def operation(_caller: int) -> None:
        await asyncio.sleep(0)

    one = await closed_loop(operation, callers=3, seconds=0.0)
    assert one.operations == len(one.latencies_s) == 3


@pytest.mark.asyncio
async def test_sides_alternate_and_their_order_reverses_each_round() -> None:
    order: list[str] = []

    async def first(_caller: int) -> None:
        order.append("a")
        await asyncio.sleep(0)

    async def second(_caller: int) -> None:
        order.append("b")
        await asyncio.sleep(0)

    sides = {"a": first, "b": second}
    found = await interleave(sides, callers=1, seconds=0.0, rounds=2)
    assert "".join(order) == "aabb" + "bbaa", "a warm-up and a round of one operation each"
    assert {name: len(rounds) for name, rounds in found.items()} == {"a": 2, "b": 2}


def test_raw_samples_are_written_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    report = Report("title", argparse.Namespace(json=file), note="text")
    report.add("case", {"side": [round_of(3 * LATENCIES_KEPT_MAX)]})
    report.write()
    found = json.loads(file.read_text())
    (one,) = found["samples"]["case"]["side"]
    assert one["operations"] == 3 * LATENCIES_KEPT_MAX
    assert len(one["latencies_us"]) == LATENCIES_KEPT_MAX
    assert one["latency_every"] == 3
    assert {"machine", "commit", "configuration", "asked"} <= found.keys()


BENCHMARK = """
import argparse, asyncio, time
from bench.support.harness import run
from bench.support.servers import temporary

async def main(asked):
    with temporary("ended") as directory:
        (directory / "file").touch()
        print(directory, flush=True)
        {waits}

run(main, argparse.Namespace(profile=False))
"""


@pytest.mark.parametrize("waits", ["await asyncio.Event().wait()", "time.sleep(600)"])
def test_a_benchmark_ended_by_sigterm_leaves_no_directory(waits: str) -> None:
    """Whether its event loop is running or blocked."""
    command = [sys.executable, "-c", BENCHMARK.format(waits=waits)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        assert (directory / "file").exists()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not directory.exists()


def test_latencies_are_printed_in_a_fitting_unit() -> None:
    assert [latency(v) for v in (2e-6, 2e-4, 2.0)] == ["2.0 µs", "0.20 ms", "2.00 s"]
