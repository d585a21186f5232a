"""Profiles a process: py-spy samples it from outside while a benchmark runs.

Benchmarks call `profiled`, which does nothing without their option `--profile`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROWS = 25
_SAMPLES_PER_S = 250


@contextmanager
def profiled(*, wanted: bool, pid: int | None = None) -> Iterator[None]:
    """Sample the process `pid` (None: this one) during the block, then list its functions by own
    time.
    """
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="indilog-profile-") as directory:
        file = Path(directory) / "stacks"
        program = Path(sys.executable).with_name("py-spy")
        sampler = subprocess.Popen(
            [
                program, "record", "--pid", str(pid or os.getpid()), "--format", "raw",
                "--output", file, "--rate", str(_SAMPLES_PER_S), "--native", "--gil",
                "--function",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            sampler.send_signal(signal.SIGINT)
            sampler.wait(60)
        _show(file)


def _show(file: Path) -> None:
    own: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        inside.update(dict.fromkeys(frames, int(count)))
    total = max(own.total(), 1)
    table = Table("function", "own", "with what it calls", title=f"profile, {total:,} samples")
    for function, samples in own.most_common(ROWS):
        table.add_row(function, f"{samples / total:.1%}", f"{inside[function] / total:.1%}")
    Console(width=140).print(table)
