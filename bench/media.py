"""Media benchmark (WORKLOADS 5): reviews composed at 100 per second and in closed loops. It checks
that each review is in all three places exactly once.

    python -m bench.media [--seconds 2] [--rounds 5] [--rates 100 200] [--callers 1 64]
"""

from __future__ import annotations

from bench.applications import bench, rates_then_clients
from bench.support.harness import arguments
from functions.media.load import Media

PAPER = {100: {"load": "  Boki", "requests/s": "100", "all p50": "26 ms"}}


if __name__ == "__main__":
    asked = arguments(
        __doc__,
        callers={"type": int, "nargs": "+", "default": [1, 64], "help": "clients"},
        rates={"nargs": "+", "type": int, "default": [100], "help": "requests a second"},
    )
    bench(Media(), rates_then_clients(asked, PAPER), asked)
