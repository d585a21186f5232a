"""Media benchmark (WORKLOADS 5): reviews composed at 100 a second, then as fast as they are
answered, and whether each is there once in all three places.

    python -m bench.media [--seconds 2] [--rounds 5] [--rates 100 200] [--callers 1 64]
"""

from __future__ import annotations

import argparse

from bench.applications import Step, at_a_rate, bench, in_a_loop
from bench.harness import arguments
from functions.media.load import Media

PAPER = {100: {"load": "  Boki", "requests/s": "100", "all p50": "26 ms"}}


def steps_of(asked: argparse.Namespace) -> list[Step]:
    """Return the rates, then the numbers of clients."""
    at_rates = [at_a_rate(rate, PAPER.get(rate, {})) for rate in asked.rates]
    return at_rates + [in_a_loop(clients) for clients in asked.callers]


if __name__ == "__main__":
    asked = arguments(
        (__doc__ or "").partition("\n\n")[0],
        callers={"type": int, "nargs": "+", "default": [1, 64], "help": "clients"},
        rates={"nargs": "+", "type": int, "default": [100], "help": "requests a second"},
    )
    bench(Media(), steps_of(asked), asked)
