"""Runs seeds of the simulation: `python -m tests.simulation --seeds 10000`.

--seed N        replay one seed and print its report; `--trace FILE` writes every event
--seeds N       run N seeds on all cores; `--start N` is the first one
--planted       run the code with bugs planted in it: each must be caught within `--seeds` (400).
                The seed in the table of docs/TESTING.md is tried first. `--write` puts each bug
                into that table as soon as it is caught; `--missing` tries only bugs without a
                row, so an interrupted run continues
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.planted import BUGS, ROOT, SEEDS_MAX, Bug
from tests.simulation.run import Report, Run, run_seed

_console = Console(width=None if Console().is_terminal else 160)
_TELL_EVERY: Final = 500
"""Seeds between two progress lines when the output is not a terminal."""
_TESTING: Final = ROOT / "docs" / "TESTING.md"
_TABLE_BEGINS: Final = "| planted bug |"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser("tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="how many seeds to run (200; planted: 400)")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--trace", type=Path, help="with --seed: write every event to this file")
    parser.add_argument("--planted", action="store_true", help="try the planted bugs")
    parser.add_argument("--write", action="store_true", help="with --planted: into docs/TESTING.md")
    parser.add_argument("--missing", action="store_true", help="with --planted: not in the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.trace)
    if given.planted:
        return _try_planted(
            given.jobs, given.seeds or SEEDS_MAX, write=given.write, missing=given.missing
        )
    return _run_many(given.start, given.seeds or 200, given.jobs)


def _replay(seed: int, trace: Path | None) -> int:
    lines: list[str] | None = [] if trace is not None else None
    report = Run(seed, lines=lines).run()
    if trace is not None and lines is not None:
        trace.write_text("\n".join([*lines, *(o.describe() for o in report.history), ""]))
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
                progress.print(report.describe(), soft_wrap=True, markup=False)
            total["seeds"] += 1
            if not _console.is_terminal and total["seeds"] % _TELL_EVERY == 0:
                _console.print(f"{total['seeds']:,} seeds, {len(failed)} failed")
    _console.print(_summed_up(seeds, total, faults, time.monotonic() - began))
    failed.sort(key=lambda report: report.seed)
    _console.print(f"{len(failed)} of {seeds:,} seeds failed: {[r.seed for r in failed][:50]}")
    return 1 if failed else 0


def reports(seeds: range, jobs: int) -> Iterator[Report]:
    """Yield the report of each seed when it ends."""
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


class Caught(NamedTuple):
    """A row of the table: a bug that was caught, by which checks, at which seed."""

    name: str
    file: str
    checks: str
    seed: int


def _try_planted(jobs: int, seeds: int, *, write: bool, missing: bool) -> int:
    """Run the code with each planted bug; return 1 if one was not caught, else 0."""
    began = time.monotonic()
    rows = caught_before(_TESTING.read_text())
    wanted = [bug for bug in BUGS if not missing or bug.name not in rows]
    missed: list[str] = []
    with _progress() as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("bugs", total=len(wanted))
        trials = {pool.submit(_caught, bug, seeds, rows.get(bug.name)): bug for bug in wanted}
        for trial in as_completed(trials):
            progress.advance(task)
            bug, found = trials[trial], trial.result()
            rows.pop(bug.name, None)
            if found["seed"] is None or not _clean(found["seed"]):
                missed.append(f"{bug.name} {' '.join(found['checks'])}")
                continue
            rows[bug.name] = Caught(bug.name, bug.file, ", ".join(found["checks"]), found["seed"])
            if write:
                _TESTING.write_text(with_table(_TESTING.read_text(), rows))
    table = Table(*_COLUMNS, title="planted bugs")
    for bug in wanted:
        if (row := rows.get(bug.name)) is not None:
            table.add_row(*map(str, row))
    _console.print(table)
    for name in missed:
        _console.print(f"NOT CAUGHT: {name}", markup=False)
    count, elapsed_s = len(wanted) - len(missed), time.monotonic() - began
    _console.print(f"{count} of {len(wanted)} planted bugs were caught, in {elapsed_s:,.0f} s.")
    return 1 if missed else 0


_COLUMNS: Final = ("planted bug", "in", "caught by", "at seed")


def caught_before(document: str) -> dict[str, Caught]:
    """Return the rows of the table in a document by name of the bug, without removed bugs."""
    names = {bug.name for bug in BUGS}
    _, _, rest = document.partition(_TABLE_BEGINS)
    rows: dict[str, Caught] = {}
    for line in rest.partition("\n\n")[0].splitlines()[2:]:
        name, file, checks, seed = (cell.strip() for cell in line.strip("|").split("|"))
        if name in names:
            rows[name] = Caught(name, file.strip("`"), checks, int(seed))
    return rows


def with_table(document: str, rows: Mapping[str, Caught]) -> str:
    """Return a document with other rows in its table, in the order of `BUGS`."""
    kept = (rows[bug.name] for bug in BUGS if bug.name in rows)
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|"]
    lines += [f"| {row.name} | `{row.file}` | {row.checks} | {row.seed} |" for row in kept]
    before, _, rest = document.partition(_TABLE_BEGINS)
    _, _, after = rest.partition("\n\n")
    return before + "\n".join(lines) + "\n\n" + after


@cache
def _clean(seed: int) -> bool:
    """Return whether the code without a bug passes a seed: otherwise the seed proves nothing."""
    violations = run_seed(seed).violations
    for violation in violations:
        _console.print(f"without any bug, seed {seed}: {violation}", markup=False)
    return not violations


def _caught(bug: Bug, seeds: int, before: Caught | None) -> dict[str, Any]:
    """Run seeds with a bug in a process of its own, first the one that caught it before."""
    command = [sys.executable, "-m", "tests.simulation.planted", bug.name, "--seeds", str(seeds)]
    if before is not None:
        command += ["--first", str(before.seed)]
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
    table.add_row("records at the end", f"{total['records']:,}")
    table.add_row("simulated hours", f"{total['simulated_ms'] / 3.6e6:.2f}")
    table.add_row("faults injected", f"{faults.total():,}")
    for kind, count in sorted(faults.items()):
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("frames lost", f"{total['frames_lost']:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
