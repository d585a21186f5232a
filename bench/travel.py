"""Travel benchmark (WORKLOADS 4): searches, recommendations, user checks and reservations, at 100
per second and in closed loops. It checks that reservations agree with the used capacity and the
placed orders.

    python -m bench.travel [--seconds 2] [--rounds 5] [--rates 100] [--callers 1 64] [--reserve]
"""

from __future__ import annotations

from pathlib import Path

from bench.applications import bench, rates_then_clients
from bench.support.harness import arguments
from functions.travel.hotels import HotelDataError, generated_hotels, read_hotels
from functions.travel.load import CAPACITY, MIX, Travel

PAPER = {100: {"load": "  Boki (Beldi)", "all p50": "20 ms (76 ms)", "all p99": "25 ms (171 ms)"}}
_LASTING_CAPACITY = 1000 * CAPACITY
"""Capacity for a load of reservations alone, so that hotels do not become full."""


if __name__ == "__main__":
    asked = arguments(
        __doc__,
        callers={"type": int, "nargs": "+", "default": [1, 64], "help": "clients"},
        rates={"nargs": "+", "type": int, "default": [100], "help": "requests a second"},
        hotels={"type": Path, "default": None, "help": "directory with hotels.json and so on"},
        reserve={"action": "store_true", "help": "reservations alone"},
    )
    try:
        hotels = generated_hotels() if asked.hotels is None else read_hotels(asked.hotels)
    except HotelDataError as error:
        raise SystemExit(str(error)) from None
    mix = {"reserve": 100.0} if asked.reserve else MIX
    bench(
        Travel(hotels, capacity=_LASTING_CAPACITY, mix=mix), rates_then_clients(asked, PAPER), asked
    )
