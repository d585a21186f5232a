"""Runs the benchmarks of the applications. Each starts a platform with the app, runs load steps in
rounds, and checks the log at the end. A table shows the paper's figures beside ours. *Local hits*
are lookups that the local index of the compute node answered; its limits are settings of the
platform, for example `INDILOG_NODE_TAG_CACHE_SEQNUMS_MAX=10000`.

The platform is a separate process (`bench.support.deployment`); this process has the clients, one
HTTP connection each. `bench.social`, `bench.travel` and `bench.media` use this module.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import uvloop

from bench.profile import profiled
from bench.support.deployment import deployed
from bench.support.harness import ROOT, Report, ended_in_order, latency, table_of
from functions.workload.demonstration import Application, Figures, checked, figures
from functions.workload.load import LoadRun, run_load
from functions.workload.replay import TraceReplay, summary_of

_WARM_UP_S = 0.5
_CLIENTS_AT_A_RATE = 64
_SEEDS_EACH = 10_000
"""Seeds of a round: each client adds its number, so that no two clients choose alike."""


class Step(NamedTuple):
    """One way to load an application.

    Attributes:
        name: the name of its row in the table.
        clients: number of clients.
        rate: requests per second of all clients together; None: closed loops.
        paper: figures of a paper by column; the column "load" names the paper.
    """

    name: str
    clients: int
    rate: float | None
    paper: Mapping[str, str]


def in_a_loop(clients: int, paper: Mapping[str, str] = MappingProxyType({})) -> Step:
    """Return the step with a number of clients in closed loops."""
    return Step(f"{clients} client{'s' if clients > 1 else ''}", clients, None, paper)


def rates_then_clients(
    asked: argparse.Namespace, paper: Mapping[int, Mapping[str, str]]
) -> list[Step]:
    """Return a step for each of `--rates`, with a paper's figures for that rate, then for each of
    `--callers`.
    """
    at_rates = [at_a_rate(rate, paper.get(rate, {})) for rate in asked.rates]
    return at_rates + [in_a_loop(clients) for clients in asked.callers]


def at_a_rate(rate: float, paper: Mapping[str, str] = MappingProxyType({})) -> Step:
    """Return the step with a rate of requests per second."""
    return Step(f"{rate:g}/s", _CLIENTS_AT_A_RATE, rate, paper)


class MeasuredStep(NamedTuple):
    """One round of a step, and the platform's figures before and after."""

    run: LoadRun
    before: Figures
    after: Figures


def bench(application: Application, steps: Sequence[Step], asked: argparse.Namespace) -> None:
    """Measure an application on its own platform, and print the table and the result of the check.

    Raises:
        SystemExit: the check found a fault.
    """
    with (
        ended_in_order(),
        deployed(ROOT / "functions" / application.name) as there,
        profiled(wanted=asked.profile, pid=there.pid),
    ):
        faults = uvloop.run(_measure(there.url, application, steps, asked))
    if faults:
        raise SystemExit(f"The check failed:\n{summary_of(faults)}")


async def _measure(
    url: str, application: Application, steps: Sequence[Step], asked: argparse.Namespace
) -> list[str]:
    report = Report(application.name, asked, platform="embedded, R = 1, fsync")
    report.say(f"loaded: {await application.load(url, lambda _: None)}")
    rounds: dict[str, list[MeasuredStep]] = {step.name: [] for step in steps}
    order = list(steps)
    await _round(url, application, steps[0], _WARM_UP_S, seed=0)
    seeds = itertools.count(1)
    for _ in range(asked.rounds):
        for step in order:
            rounds[step.name].append(
                await _round(url, application, step, asked.seconds, seed=next(seeds) * _SEEDS_EACH)
            )
        order.reverse()
    replay, faults = await checked(url, application, lambda *_: None)
    _show(report, application, [(step, rounds[step.name]) for step in steps], replay)
    verdict = f"NOT correct, {len(faults)} faults" if faults else application.verdict(replay)
    report.say(f"verdict: {verdict}")
    report.keep("verdict", verdict)
    report.write()
    return faults


async def _round(
    url: str, application: Application, step: Step, seconds: float, *, seed: int
) -> MeasuredStep:
    before = await figures(url, application.name)
    run = await run_load(
        url,
        application.name,
        application.visitors(step.clients, seed),
        functions=application.functions,
        seconds=seconds,
        rate=step.rate,
    )
    await application.settle(url)
    return MeasuredStep(run, before, await figures(url, application.name))


def _show(
    report: Report,
    application: Application,
    rounds: Sequence[tuple[Step, list[MeasuredStep]]],
    replay: TraceReplay,
) -> None:
    columns = (
        "load", "requests/s", *[f"{name} p50" for name in application.functions], "all p50",
        "all p99", "failed", "conflicts", "local hits",
    )  # fmt: skip
    table = table_of(
        f"functions/{application.name} over HTTP, synced; medians of the rounds; papers' below",
        *columns,
    )
    for step, measured in rounds:
        runs = [one.run for one in measured]
        table.add_row(
            step.name,
            f"{median(run.requests / run.seconds for run in runs):,.0f}",
            *[_percentile(runs, 50, name) for name in application.functions],
            _percentile(runs, 50),
            _percentile(runs, 99),
            f"{sum(sum(run.all.failures.values()) for run in runs):,}",
            f"{_conflicts(measured, replay):.2%}",
            f"{_local_hits(measured):.1%}",
        )
        if step.paper:
            table.add_row(*[step.paper.get(column, "") for column in columns], style="dim")
        report.keep(step.name, [_raw(run) for run in runs])
    report.show(table)


def _percentile(runs: Sequence[LoadRun], percent: float, function: str | None = None) -> str:
    """Return a percentile of the latencies of one function, or of all requests, as the median over
    the runs.
    """
    tallies = [run.all if function is None else run.tallies[function] for run in runs]
    answered = [tally.percentile_s(percent) for tally in tallies if tally.latencies_s]
    return latency(median(answered)) if answered else "-"


def _conflicts(measured: Sequence[MeasuredStep], replay: TraceReplay) -> float:
    """Return the share of the application's records that had no effect because of a conflict."""
    appends = sum(one.after.tail - one.before.tail for one in measured)
    lost = sum(
        one.before.tail <= seqnum < one.after.tail
        for one in measured
        for seqnum in replay.conflicts
    )
    return lost / appends if appends else 0.0


def _local_hits(measured: Sequence[MeasuredStep]) -> float:
    """Return the share of the lookups that the local index answered (thesis, Figures 7.9, 7.10)."""
    hits = sum(one.after.hits - one.before.hits for one in measured)
    misses = sum(one.after.misses - one.before.misses for one in measured)
    return hits / (hits + misses) if hits + misses else 1.0


def _raw(run: LoadRun) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "latencies_us": {
            name: [round(value * 1e6) for value in tally.latencies_s]
            for name, tally in run.tallies.items()
        },
        "failures": {name: dict(tally.failures) for name, tally in run.tallies.items()},
    }
