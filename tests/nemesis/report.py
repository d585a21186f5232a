"""What a run prints, and the files that it leaves after a violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.nemesis.run import Outcome

PAUSES: Final = 5
"""Longest pauses that are printed."""
VIOLATIONS: Final = 20
"""First violations that are printed."""


def tables(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the tables: faults by kind, operations by kind, and pauses."""
    by_kind: dict[str, list[float]] = {}
    for injected in outcome.injected:
        by_kind.setdefault(injected.fault.kind, []).append(injected.recovered_s - injected.undone_s)
    yield "| fault | times | longest recovery |"
    yield "|---|---|---|"
    for kind in sorted(by_kind, key=lambda kind: -len(by_kind[kind])):
        yield f"| {kind} | {len(by_kind[kind]):,} | {max(by_kind[kind]):.1f} s |"
    yield f"| all | {len(outcome.injected):,} | |"
    yield ""
    kinds = dict.fromkeys(kind for kind, _ in outcome.recorder.counts)
    yield "| operation | times | by outcome |"
    yield "|---|---|---|"
    for kind in kinds:
        found = Counter({o: n for (k, o), n in outcome.recorder.counts.items() if k == kind})
        shown = ", ".join(f"{count:,} {outcome}" for outcome, count in found.most_common())
        yield f"| {kind} | {found.total():,} | {shown} |"
    yield ""
    yield "| longest time without an append | began at | faults |"
    yield "|---|---|---|"
    for length_s, began_s in outcome.pauses[:PAUSES]:
        during = _faults_during(outcome, began_s, length_s)
        yield f"| {length_s:.1f} s | {began_s:.1f} s | {during} |"

    yield ""
    yield f"{outcome.proxied_bytes:,} bytes between nodes went through the proxies"


def _faults_during(outcome: Outcome, began_s: float, length_s: float) -> str:
    found = [
        f"{injected.fault.kind} of {injected.fault.target}"
        for injected in outcome.injected
        if injected.began_s < began_s + length_s and injected.recovered_s > began_s
    ]
    return ", ".join(found)


def write_evidence(outcome: Outcome, directory: Path) -> tuple[Path, Path]:
    """Write the history of the log and the log of faults; return both files."""
    history, faults = directory / "history.txt", directory / "faults.txt"
    history.write_text("".join(f"{o.describe()}\n" for o in outcome.recorder.operations))
    faults.write_text("".join(f"{injected}\n" for injected in outcome.injected))
    return history, faults


def verdict(outcome: Outcome, directory: Path) -> Iterator[str]:
    """Yield the violations, with the files that help to explain them."""
    for kind in outcome.left_out:
        yield f"left out, because it cannot be injected here: {kind}"
    if not outcome.violations:
        yield f"seed {outcome.seed}: 0 violations"
        return
    history, faults = write_evidence(outcome, directory)
    yield f"seed {outcome.seed}: {len(outcome.violations)} violations"
    yield from outcome.violations[:VIOLATIONS]
    yield f"history {history}, faults {faults}, data and log in {directory}"
