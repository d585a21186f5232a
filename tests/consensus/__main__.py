"""Explore the consensus core at any size: `python -m tests.consensus --states 50000 --walks 10000`.

It prints each search; a broken guarantee is printed with the steps that lead to it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from tests.consensus.explorer import search

_WALKS_SHOWN: Final = 500


def main() -> int:
    """Run the searches; 1: a guarantee is broken."""
    parser = argparse.ArgumentParser("tests.consensus", description=main.__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="states of each search")
    parser.add_argument("--walks", type=int, default=2_000, help="random walks")
    given = parser.parse_args()
    states = 0
    for number, (name, explored) in enumerate(search(given.states, given.walks)):
        states += explored.states
        if explored.found is not None:
            sys.stdout.write("\n".join((name, *explored.found.steps, explored.found.what)) + "\n")
            return 1
        if not name.startswith("walk") or number % _WALKS_SHOWN == 0:
            sys.stdout.write(f"{name}: {explored.states}\n")
    sys.stdout.write(f"{states} states and steps, nothing found\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
