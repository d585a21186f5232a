"""Benchmarks of applications, against functions over a log in memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.applications import MeasuredStep, Step, _conflicts, _measure, at_a_rate, in_a_loop
from functions.media import app as media
from functions.media.load import Media
from functions.workload.demonstration import Figures
from functions.workload.load import LoadRun
from functions.workload.replay import TraceReplay
from tests.unit.functions.stand_in import serving

PAPER = {"load": "  the paper", "all p50": "26 ms"}


def asked(**options: object) -> argparse.Namespace:
    return argparse.Namespace(**{"rounds": 2, "seconds": 0.1, "json": None} | options)


async def shown(application: Media, steps: list[Step], options: argparse.Namespace) -> list[str]:
    async with serving(media.app) as gateway:
        return await _measure(gateway.url, application, steps, options)


@pytest.mark.asyncio
async def test_the_papers_figures_follow_ours_and_the_verdict_follows_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "samples"
    steps = [at_a_rate(50, PAPER), in_a_loop(1), in_a_loop(3)]
    assert await shown(Media(users=3, movies=3), steps, asked(json=file)) == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == [
        "50/s", "the paper", "1 client", "3 clients",
    ]  # fmt: skip
    assert "26 ms" in lines[1]
    kept = json.loads(file.read_text())["figures"]
    assert [len(run["latencies_us"]["compose"]) for run in kept["50/s"]] == [5, 5]
    assert "once by its id" in kept["verdict"]


@pytest.mark.asyncio
async def test_a_fault_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    application = Media(users=3, movies=3)
    application.acknowledged["lost"] = "A review that is not stored."
    faults = await shown(application, [in_a_loop(1)], asked())
    assert faults == ["Review lost was acknowledged and is lost."]
    assert "verdict: NOT correct, 1 faults" in capsys.readouterr().out


def test_conflicts_are_counted_per_round_and_as_a_share_of_its_records() -> None:
    def one(first: int, last: int) -> MeasuredStep:
        return MeasuredStep(LoadRun({}), Figures(first, 0, 0), Figures(last, 0, 0))

    replay = TraceReplay(conflicts=[3, 10, 14, 19, 30])
    assert _conflicts([one(10, 15), one(20, 35)], replay) == 3 / 20
    assert _conflicts([one(10, 10)], replay) == 0
