"""The nemesis: `python -m tests.cluster --minutes 10 --seed 1`.

Starts a cluster of processes on this machine, puts load on it, and injects faults that the seed
decides, within what the settings promise. Afterwards checkers judge what callers saw. Ends with 1
if a guarantee was broken, and leaves the history, the faults and the data.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop

from indilog.config.cluster import LOST_STORAGE_POLICIES
from tests.nemesis.promise import TOPOLOGIES
from tests.nemesis.report import tables, verdict, write_evidence
from tests.nemesis.run import Outcome, run


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser("tests.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="time of faults (1)")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and the load")
    parser.add_argument("--faults", help="kinds, with commas between (all)")
    parser.add_argument(
        "--cluster", choices=TOPOLOGIES, default="processes",
        help="a process for each node and a supervisor, or `indilog node` and ZooKeeper",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=LOST_STORAGE_POLICIES, default="mask",
        help="lost_storage_policy of a cluster of processes; appends wait, except with mask",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the directory of the run")
    given = parser.parse_args()
    known = TOPOLOGIES[given.cluster].kinds
    kinds = [kind.strip() for kind in given.faults.split(",")] if given.faults else list(known)
    if unknown := set(kinds) - known.keys():
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    directory = Path(tempfile.mkdtemp(prefix="nemesis-"))
    if given.cluster == "machines" and given.policy != "mask":
        parser.error("three machines mask a lost storage node: use --cluster processes")
    seconds = given.minutes * 60.0
    outcome = nemesis(given.seed, seconds, kinds, directory, given.cluster, given.policy)
    for line in (*tables(outcome), "", *verdict(outcome, directory)):
        sys.stdout.write(f"{line}\n")
    if given.keep:
        write_evidence(outcome, directory)
        sys.stdout.write(f"kept {directory}\n")
    elif not outcome.violations:
        shutil.rmtree(directory)
    return 1 if outcome.violations else 0


def nemesis(
    seed: int,
    seconds: float,
    kinds: list[str],
    directory: Path,
    topology: str,
    policy: str = "mask",
) -> Outcome:
    """Run the nemesis in an event loop of its own; returns what happened."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(seed, seconds, kinds, directory, topology, policy))
