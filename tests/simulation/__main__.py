"""Runs seeds of the simulation: `python -m tests.simulation --seeds 10000`.

--seed N        replay one seed and tell what happened; `--trace FILE` writes every event
--seeds N       run many, on all cores; `--start N` begins elsewhere
--planted       run the code with bugs planted in it: each must be caught
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.run import Report, Run, run_seed

_console = Console()


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser("tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--trace", type=Path, help="with --seed: write every event to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.trace)
    return _run_many(given.start, given.seeds, given.jobs)


def _replay(seed: int, trace: Path | None) -> int:
    lines: list[str] | None = [] if trace is not None else None
    report = Run(seed, lines=lines).run()
    if trace is not None and lines is not None:
        trace.write_text("\n".join([*lines, *(o.told() for o in report.history), ""]))
    _console.print(report.arrangement, soft_wrap=True, highlight=False)
    for violation in report.violations:
        _console.print(f"{violation.check}: {violation.what}", soft_wrap=True, markup=False)
    _console.print(f"seed {seed} digest {report.digest} operations {report.operations}")
    return 1 if report.violations else 0


def _run_many(start: int, seeds: int, jobs: int) -> int:
    began = time.monotonic()
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failed: list[Report] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_console,
    ) as progress:
        task = progress.add_task("seeds", total=seeds)
        for report in reports(range(start, start + seeds), jobs):
            progress.advance(task)
            for name in ("operations", "acknowledged", "unknown", "records", "frames_lost"):
                total[name] += getattr(report, name)
            total["simulated_ms"] += int(report.simulated_s * 1000)
            faults.update(report.faults)
            if report.violations:
                failed.append(report)
                progress.print(report.told(), soft_wrap=True, markup=False)
    _console.print(_summed_up(seeds, total, faults, time.monotonic() - began))
    failed.sort(key=lambda report: report.seed)
    _console.print(f"{len(failed)} of {seeds:,} seeds failed: {[r.seed for r in failed][:50]}")
    return 1 if failed else 0


def reports(seeds: range, jobs: int) -> Iterator[Report]:
    """Yield the report of each seed, as they come."""
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def _summed_up(seeds: int, total: Counter[str], faults: Counter[str], elapsed_s: float) -> Table:
    table = Table("what", "how much", title="simulation")
    table.add_row("seeds", f"{seeds:,}")
    table.add_row("seeds a second", f"{seeds / elapsed_s:.1f}")
    table.add_row("operations checked", f"{total['operations']:,}")
    table.add_row("of them answered", f"{total['acknowledged']:,}")
    table.add_row("of them unknown", f"{total['unknown']:,}")
    table.add_row("records in the end", f"{total['records']:,}")
    table.add_row("simulated hours", f"{total['simulated_ms'] / 3.6e6:.2f}")
    table.add_row("faults injected", f"{faults.total():,}")
    for kind, count in sorted(faults.items()):
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("frames lost", f"{total['frames_lost']:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
