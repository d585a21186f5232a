"""Runs the demo on a running platform: loads hotels, runs the load, checks the result, shows a
table.

`python -m functions.travel.demo --url http://127.0.0.1:8080 --seconds 10 [--hotels DIR]`; the app
must be deployed (`indilog deploy functions/travel`). The exit code is 1 if the check finds a fault.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from functions.travel.hotels import HotelDataError, generated_hotels, read_hotels
from functions.travel.load import Travel
from functions.workload.demonstration import run_demo


def main(
    url: Annotated[str, typer.Option(help="URL of the platform.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 10.0,
    hotels: Annotated[
        Path | None,
        typer.Option(
            help="Directory with hotels.json, geo.json, inventory.json; default: generated."
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent clients.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Run the travel demo on a platform that is up."""
    try:
        known = generated_hotels() if hotels is None else read_hotels(hotels)
    except HotelDataError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(2) from None
    run_demo(url, Travel(known), seconds=seconds, clients=clients, seed=seed)


if __name__ == "__main__":
    typer.run(main)
