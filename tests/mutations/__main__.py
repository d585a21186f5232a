"""Changes single places of the code and runs the tests that should notice each change:
`python -m tests.mutations --seed 1 --count 100`.

Each mutation is made in a private copy of the tree. Tests run from narrow to wide until one fails.
First come those that import the mutated module, then those of its part (`PARTS`), then seeds of the
simulation and the tests of what uses the part. A mutation that no test notices survives: it shows a
missing test, code that is not needed, or a change that no caller can observe.

No library does this here: cosmic-ray and mutmut run one command for all modules, and the whole
suite takes a quarter of an hour. Neither draws a sample that stays the same after edits elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from scripts.changed_tests import PATHS, tests_of
from tests.mutations.sites import FOLDERS, ROOT, Site, sample

_ORACLE: Final = "tests/properties/test_reads_against_oracle.py"
_FUNCTIONS: Final = (
    "tests/contract/test_invocations.py", "tests/contract/test_invocation_faults.py",
    "tests/contract/test_held_calls.py",
    "tests/properties/test_invocations.py", "tests/properties/test_deployments.py",
    "tests/properties/test_dispatch.py",
)  # fmt: skip
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "indilog/kernel": (
        "tests/unit/kernel", "tests/unit/ordering", "tests/unit/storage", "tests/unit/index_tier",
        "tests/scenarios", "tests/properties/test_records.py",
        "tests/properties/test_*metalog*.py", "tests/properties/test_index_snapshot.py",
        "tests/properties/test_tombstones.py", _ORACLE,
    ),
    "indilog/wire": (
        "tests/unit/wire", "tests/unit/ordering", "tests/unit/storage", "tests/unit/index_tier",
        "tests/scenarios", "tests/unit/compute/test_*.py",
    ),
    "indilog/replayed": (
        "tests/unit/replayed", "tests/properties/replayed", "tests/unit/bokiqueue",
        "tests/unit/bokistore",
    ),
    "ordering": (
        "tests/unit/ordering", "tests/scenarios", "tests/properties/test_*metalog*.py",
        "tests/properties/test_ordering*.py", "tests/properties/test_trims.py",
    ),
    "storage": (
        "tests/unit/storage", "tests/scenarios", "tests/properties/test_tombstones.py",
        "tests/properties/storage/test_storage.py", "tests/unit/runtime/test_*.py",
        "tests/contract/test_cold_tier.py", _ORACLE,
    ),
    "index_tier": (
        "tests/unit/index_tier", "tests/scenarios", "tests/properties/test_*index*.py",
        "tests/properties/test_tombstones.py", _ORACLE,
    ),
    "compute/indilog_compute/gateway": ("tests/unit/compute/gateway", *_FUNCTIONS),
    "compute/indilog_compute/invocations": ("tests/unit/compute/invocations", *_FUNCTIONS),
    "compute/indilog_compute/log_kinds": (
        "tests/unit/compute/test_log_kinds.py", "tests/cells/test_log_kinds.py",
        "tests/cells/test_order_first.py",
    ),
    "compute/indilog_compute/workers": ("tests/unit/compute/workers", *_FUNCTIONS),
    "compute": (
        "tests/unit/compute/reads", "tests/unit/compute/test_*.py", "tests/contract/test_log.py",
        "tests/contract/test_sessions.py", "tests/contract/test_trim.py",
        "tests/contract/test_conditional_appends.py", "tests/contract/test_retention.py",
        "tests/contract/test_live.py", "tests/scenarios",
        "tests/properties/test_local_index.py", "tests/properties/test_after_a_miss.py",
        "tests/properties/test_warm_up.py", "tests/properties/test_retention.py",
        "tests/properties/test_trims.py", _ORACLE,
    ),
    "cells": (
        "tests/unit/cells", "tests/cells", "tests/contract/test_log.py",
        "tests/contract/test_trim.py", "tests/contract/test_conditional_appends.py",
        "tests/contract/test_live.py",
    ),
    "libs/bokiflow": (
        "tests/unit/bokiflow", "tests/contract/test_bokiflow.py",
        "tests/contract/test_locks_and_operations.py", "tests/properties/libs",
    ),
    "libs/bokiqueue": (
        "tests/unit/bokiqueue", "tests/contract/test_bokiqueue.py",
        "tests/properties/libs/test_bokiqueue.py",
    ),
    "libs/bokistream": (
        "tests/unit/bokistream", "tests/contract/test_bokistream.py",
        "tests/properties/libs/test_bokistream.py",
    ),
    "libs/bokiviews": (
        "tests/unit/bokiviews", "tests/contract/test_bokiviews.py",
        "tests/properties/libs/test_bokiviews.py", "tests/serializability/test_views.py",
    ),
    "libs/bokistore": (
        "tests/unit/bokistore", "tests/properties/libs/test_bokistore.py",
        "tests/serializability",
    ),
}  # fmt: skip
"""The tests of each part. A file belongs to the first part whose folder it is in."""
_APPLICATIONS: Final = ("tests/unit/functions", "tests/unit/testing")
_UNSIMULATED: Final = ("indilog/replayed", "cells", "libs")
"""Parts that `tests.simulation` does not execute, beside the parts below `compute`."""
_SEEDS: Final = ("-m", "tests.simulation", "--seeds", "15", "--jobs", "1")
_PYTEST: Final = (
    "-m", "pytest", "-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider",
    "--timeout", "60",
)  # fmt: skip
_WITHOUT_PROCESSES: Final = ("-m", "not cluster")
_NOTHING_COLLECTED: Final = 5
"""Exit code of pytest."""
_SUMMARY: Final = re.compile(r"(FAILED|ERROR) \S+\.py")
"""A line of pytest's summary; captured log lines may begin with "ERROR", too."""
_STEP_S_MAX: Final = 900
"""Seconds that the tests of one step may take; a mutation that takes longer is noticed."""
_MEMORY_MAX: Final = 6 << 30
"""Bytes of address space of a process, so that an endless loop fails."""


def main() -> int:
    """Run the command line; return 1 if a mutation survived."""
    parser = argparse.ArgumentParser("tests.mutations", description=__doc__.split(":")[0])
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutations")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--under", nargs="+", default=FOLDERS, help="folders to draw from")
    parser.add_argument("--only", default="", help="of them those whose FILE:LINE contains this")
    parser.add_argument("--list", action="store_true", help="show them and run no test")
    parser.add_argument(
        "--narrow", action="store_true", help="leave out the widest tests, and those with processes"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree")
    given = parser.parse_args()
    chosen = [
        site for site in sample(given.seed, given.count, given.under) if given.only in _place(site)
    ]
    if given.list:
        _say(*(_told(site) for site in chosen))
        return 0
    planned = {site: list(steps(site, is_narrow=given.narrow)) for site in chosen}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            trees.put(_copied(Path(folder) / str(number)))

        def tried(site: Site) -> bool:
            tree = trees.get()
            try:
                by = noticed_by(tree, site, planned[site])
            except RuntimeError as error:
                _say(f"UNCLEAR  {_told(site)}  {error}")
                return False
            finally:
                trees.put(tree)
            _say(f"{'noticed ' if by else 'SURVIVED'} {_told(site)}  {by or ''}")
            return by is not None

        with ThreadPoolExecutor(given.jobs) as pool:
            noticed = sum(pool.map(tried, chosen))
    _say(f"{noticed} of {len(chosen)} mutations of seed {given.seed} were noticed")
    return int(noticed < len(chosen))


def steps(site: Site, *, is_narrow: bool) -> Iterator[Sequence[str]]:
    """Yield the arguments of Python for each step of tests, from narrow to wide."""
    part = next(folder for folder in PARTS if site.file.startswith(f"{folder}/"))
    own = PARTS[part]
    pytest = (*_PYTEST, *(_WITHOUT_PROCESSES if is_narrow else ()))
    same = [path for path in _unit_tests() if path.name == f"test_{Path(site.file).stem}.py"]
    names = {str(path.relative_to(ROOT)) for path in same} | tests_of({site.file})
    if narrow := sorted(name for name in names if name.startswith("tests/unit")):
        yield *pytest, *narrow
    yield *pytest, *(str(path.relative_to(ROOT)) for name in own for path in _matching(name))
    if is_narrow:
        return
    if not part.startswith((*_UNSIMULATED, "compute/")):
        yield _SEEDS
    yield *_PYTEST, *_APPLICATIONS


@cache
def _unit_tests() -> list[Path]:
    return sorted(ROOT.glob("tests/unit/**/test_*.py"))


@cache
def _matching(name: str) -> list[Path]:
    found = sorted(ROOT.glob(name))
    assert found, f"there is no {name}"
    return found


def _copied(tree: Path) -> Path:
    """Copy what git knows, and files that are new, to `tree`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    if (ROOT / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")  # scripts of the project run its Python
    return tree


def noticed_by(tree: Path, site: Site, planned: Sequence[Sequence[str]]) -> str | None:
    """Return what noticed a mutation; None: it survived.

    Raises:
        RuntimeError: that test also fails without the mutation, so it noticed nothing.
    """
    path = tree / site.file
    source = path.read_bytes()
    path.write_bytes(site.mutated(source))
    by = None
    try:
        for step in planned:
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
            if (by := _failed(tree, step)) is not None:
                break
    finally:
        path.write_bytes(source)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
    if by is not None and by.startswith("FAILED "):
        test = by.removeprefix("FAILED ").partition("[")[0]
        if _failed(tree, [*_PYTEST, test]) is not None:
            raise RuntimeError(f"{test} fails without a mutation, too.")
    return by


def _failed(tree: Path, arguments: Sequence[str]) -> str | None:
    """Return what failed in one step; None: nothing."""
    roots = os.pathsep.join(str(tree / folder) for folder in PATHS)
    environment = {**os.environ, "PYTHONPATH": roots, "HYPOTHESIS_PROFILE": "ci"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY_MAX, _MEMORY_MAX))
    try:
        output, _ = process.communicate(timeout=_STEP_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no end within {_STEP_S_MAX} s"
    if process.returncode in (0, _NOTHING_COLLECTED):
        return None
    lines = output.splitlines()
    by = [line for line in lines if _SUMMARY.match(line)]
    return (by or lines[-1:] or ["nothing was printed"])[0].split(" - ")[0]


def _place(site: Site) -> str:
    return f"{site.file}:{site.line}"


def _told(site: Site) -> str:
    before, after = (" ".join(text.split()) for text in (site.before, site.after))
    return f"{_place(site)}  {before[:80]}  ->  {after[:80]}"


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
