"""Runs seeds of the simulation: `python -m tests.simulation --seeds 10000`.

--seed N        replay one seed and tell what happened; `--trace FILE` writes every event
--seeds N       run many, on all cores; `--start N` begins elsewhere
--planted       run the code with bugs planted in it: each must be caught; `--write` puts the table
                into docs/TESTING.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.planted import BUGS, ROOT, Bug
from tests.simulation.run import Report, Run, run_seed

_console = Console(width=None if Console().is_terminal else 160)
_TELL_EVERY: Final = 500
"""Where nobody sees a progress bar, so many seeds are a line."""
_TESTING: Final = ROOT / "docs" / "TESTING.md"
_TABLE_BEGINS: Final = "| planted bug |"


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser("tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--trace", type=Path, help="with --seed: write every event to this file")
    parser.add_argument("--planted", action="store_true", help="try the planted bugs")
    parser.add_argument("--write", action="store_true", help="with --planted: into docs/TESTING.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.trace)
    if given.planted:
        return _try_planted(given.jobs, write=given.write)
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
    with _progress() as progress:
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
            total["seeds"] += 1
            if not _console.is_terminal and total["seeds"] % _TELL_EVERY == 0:
                _console.print(f"{total['seeds']:,} seeds, {len(failed)} failed")
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


def _try_planted(jobs: int, *, write: bool) -> int:
    """Run the code with each bug planted in it; 1: one was not caught."""
    missed = 0
    rows: list[tuple[str, ...]] = []
    with _progress() as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("bugs", total=len(BUGS))
        for bug, found in zip(BUGS, pool.map(_caught, BUGS), strict=True):
            progress.advance(task)
            missed += found["seed"] is None or not _clean(found["seed"])
            checks = ", ".join(found["checks"]) or "NOTHING"
            rows.append((bug.name, bug.file, checks, str(found["seed"])))
    table = Table(*_COLUMNS, title="planted bugs")
    for row in rows:
        table.add_row(*row)
    _console.print(table)
    if write and not missed:
        _write_table(rows)
    _console.print(f"{len(BUGS) - missed} of {len(BUGS)} planted bugs were caught.")
    return 1 if missed else 0


_COLUMNS: Final = ("planted bug", "in", "caught by", "at seed")


def _write_table(rows: list[tuple[str, ...]]) -> None:
    """Replace the table in docs/TESTING.md."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|"]
    lines += [f"| {name} | `{file}` | {checks} | {seed} |" for name, file, checks, seed in rows]
    before, _, rest = _TESTING.read_text().partition(_TABLE_BEGINS)
    _, _, after = rest.partition("\n\n")
    _TESTING.write_text(before + "\n".join(lines) + "\n\n" + after)


@cache
def _clean(seed: int) -> bool:
    """Tell whether the code without a bug passes a seed: else nothing was shown by it."""
    violations = run_seed(seed).violations
    for violation in violations:
        _console.print(f"without any bug, seed {seed}: {violation}", markup=False)
    return not violations


def _caught(bug: Bug) -> dict[str, Any]:
    """Run seeds with a bug in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation.planted", bug.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"seed": None, "checks": [done.stderr[-300:]]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_console,
    )


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
