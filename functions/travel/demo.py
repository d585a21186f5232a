"""The demo on a running platform: load hotels, run the load, check the result, show a table.

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
    url: Annotated[str, typer.Option(help="Where the platform answers.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the load runs.")] = 10.0,
    hotels: Annotated[
        Path | None,
        typer.Option(
            help="A directory with hotels.json, geo.json, inventory.json; else generated."
        ),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Clients at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 1,
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
