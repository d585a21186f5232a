"""Reproduces the shapes of the thesis's evaluation (thesis 7.2 to 7.5): local hits, types of reads,
index shards, merging nodes, new tags. `docs/REPRODUCTION.md` has the figures beside the thesis's.

Every side of an experiment is a separate platform with the thesis's limits and without a record
cache. Sides run interleaved, round by round. *Local hits* are reads without a question to the index
tier. *Thesis* sides lack the mechanisms that are not in the thesis (refills, the answer cache). As
in the thesis, records are not synced (`durability = "memory"`).

    python -m bench.reproduction [--experiments hits ...] [--callers 64] [--seconds 2]
    [--rounds 5]
"""

from __future__ import annotations

import argparse
import tempfile
from array import array
from collections.abc import Mapping
from contextlib import AsyncExitStack
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias

from bench.log_mix import RATIOS, WORKLOADS, Mixing
from bench.support import platforms
from bench.support.harness import (
    Report,
    Round,
    closed_loop,
    command,
    interleave,
    latency,
    median_of,
    ratio_of,
    table_of,
)
from bench.support.platforms import Bench, Status

Settings: TypeAlias = Mapping[str, dict[str, Any]]

OURS: Final[dict[str, Any]] = {"record_cache_bytes_max": 0}
THESIS: Final[dict[str, Any]] = {**OURS, "answer_cache_entries_max": 0, "refills_per_s_max": 0}
NONE: Final[dict[str, Any]] = {**THESIS, "local_index": "none"}
EXTENDED: Final[dict[str, Any]] = {**THESIS, "local_index": "extended"}

TIER = ("exact", "closest", "none")
"""Answers of the index tier: types 2 and 3 of reads, and a proof that there is no record."""
EXACT = ("seq own", "seq popular", "seq suffix", "tag direct")
"""Kinds of reads whose bound is the record that they find."""


class Side(NamedTuple):
    """One platform: its settings and its workload."""

    settings: Settings
    workload: str
    ratio: str = "1:1"


def _sides(workload: str, ratio: str = "1:1", **nodes: dict[str, Any]) -> dict[str, Side]:
    return {name: Side({"node": node}, workload, ratio) for name, node in nodes.items()}


def _tiers(**clusters: dict[str, Any]) -> dict[str, Side]:
    """Return sides without local index and with 95 % reads, as in thesis 7.3."""
    return {
        name: Side({"node": NONE, "cluster": cluster}, "mix", "1:19")
        for name, cluster in clusters.items()
    }


EXPERIMENTS: Final[dict[str, dict[str, Side]]] = {
    "high-hits": _sides("mix", thesis=THESIS, ours=OURS),
    "low-hits": _sides("against-us", thesis=THESIS, ours=OURS),
    "high-hits-reads": _sides("mix", "1:19", thesis=THESIS, ours=OURS),
    "low-hits-reads": _sides("against-us", "1:19", thesis=THESIS, ours=OURS),
    "compute-nodes": {
        f"{engines}": Side({"node": THESIS, "cluster": {"engines": engines}}, "mix")
        for engines in (1, 2, 4)
    },
    "types": _tiers(tier=dict[str, Any]()) | _sides("new-tags", "1:19", local=THESIS),
    "index-shards": _tiers(two={"index_shards": 2}, six={"index_shards": 6}),
    "aggregators": _tiers(one={"aggregators": 1}, two={"aggregators": 2}),
    "merging": _tiers(
        aggregator={"aggregation": "aggregator"}, master={"aggregation": "master-slave"}
    ),
    "new-tags-mix": _sides("mix", default=THESIS, extended=EXTENDED),
    "new-tags-skewed": _sides("new-tags-read-min", default=THESIS, extended=EXTENDED),
}
"""The first side of each experiment is the base of the comparison."""


class SideMeasurements(NamedTuple):
    """The measurements of one side."""

    rounds: list[Round]
    reads: int
    tier: dict[str, int]
    """How often the index tier answered, by `TIER`."""
    latencies_s: dict[str, array[float]]
    """The latencies by kind of operation."""

    @property
    def local_hits(self) -> float:
        """Share of the reads without a question to the index tier."""
        return 1 - sum(self.tier.values()) / max(self.reads, 1)

    def share(self, kind: str) -> float:
        """Share of the reads with an answer of this kind from the index tier."""
        return self.tier[kind] / max(self.reads, 1)

    def median_latency(self, *, exact: bool) -> str:
        """Return the median latency of the reads that find their bound itself, or of the others."""
        values = [
            value
            for kind, latencies in self.latencies_s.items()
            if kind != "append" and (kind in EXACT) == exact
            for value in latencies
        ]
        return latency(median(values)) if values else "-"


async def measure(
    sides: Mapping[str, Side], callers: int, asked: argparse.Namespace
) -> dict[str, SideMeasurements]:
    """Run the sides of one experiment interleaved, each on a platform of its own."""
    async with AsyncExitStack() as stack:
        mixings: dict[str, Mixing] = {}
        benches: dict[str, Bench] = {}
        for name, side in sides.items():
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="indilog-bench-"))
            cluster = {"durability": "memory", **side.settings.get("cluster", {})}
            config = platforms.configured(
                path, processes=asked.processes, node=side.settings["node"], cluster=cluster
            )
            running = platforms.running(config, processes=asked.processes)
            benches[name] = bench = await stack.enter_async_context(running)
            mixings[name] = mixing = Mixing(
                bench.logs, WORKLOADS[side.workload], RATIOS[side.ratio], callers
            )
            await closed_loop(mixing.operation, callers=callers, seconds=asked.seconds / 2)
            mixing.latencies_s.clear()
        before = {name: bench.status() for name, bench in benches.items()}
        rounds = await interleave(
            {name: mixing.operation for name, mixing in mixings.items()},
            callers=callers, seconds=asked.seconds, rounds=asked.rounds,
        )  # fmt: skip
        return {
            name: _found(rounds[name], mixings[name], before[name], bench.status())
            for name, bench in benches.items()
        }


def _found(rounds: list[Round], mixing: Mixing, before: Status, after: Status) -> SideMeasurements:
    tier = {kind: after["index_tier"][kind] - before["index_tier"][kind] for kind in TIER}
    reads = sum(len(values) for kind, values in mixing.latencies_s.items() if kind != "append")
    return SideMeasurements(rounds, reads, tier, dict(mixing.latencies_s))


async def main(asked: argparse.Namespace) -> None:
    """Run the experiments that were asked for; print a row a side."""
    report = Report("reproduction", asked, experiments={n: str(s) for n, s in EXPERIMENTS.items()})
    table = table_of(
        "the thesis's experiments",
        "experiment, callers", "side", "reads", "local hits", "type 2", "type 3", "none",
        "exact p50", "closest p50", "ops/s", "of the first", "CPU/op",
    )  # fmt: skip
    for name in asked.experiments:
        for callers in asked.callers:
            found = await measure(EXPERIMENTS[name], callers, asked)
            base = next(iter(found.values()))
            report.add(f"{name} {callers}", {side: one.rounds for side, one in found.items()})
            for side, one in found.items():
                figures = [f"{one.local_hits:.1%}", *(f"{one.share(kind):.1%}" for kind in TIER)]
                report.keep(f"{name} {callers} {side}", [one.reads, *figures])
                relative = ratio_of(one.rounds, base.rounds, lambda r: r.per_second)
                cpu_s = median_of(one.rounds, lambda r: r.cpu_s / max(r.operations, 1))
                table.add_row(
                    f"{name} {callers}", side, f"{one.reads:,}", *figures,
                    one.median_latency(exact=True), one.median_latency(exact=False),
                    f"{median_of(one.rounds, lambda r: r.per_second):,.0f}",
                    f"{relative:.2f}", f"{cpu_s * 1e6:.0f} µs",
                )  # fmt: skip
        table.add_section()
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        experiments={
            "nargs": "+",
            "choices": list(EXPERIMENTS),
            "default": list(EXPERIMENTS),
        },
        processes={"action": "store_true", "help": "tiers as processes"},
    )
