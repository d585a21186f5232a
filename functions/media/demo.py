"""Runs the demo on a running platform: loads users and movies, composes reviews, checks them, shows
a table.

`python -m functions.media.demo --url http://127.0.0.1:8080 --seconds 10`; the app must be deployed
(`indilog deploy functions/media`). The exit code is 1 if the check finds a fault.
"""

from __future__ import annotations

from typing import Annotated

import typer

from functions.media.load import Media
from functions.workload.demonstration import run_demo


def main(
    url: Annotated[str, typer.Option(help="URL of the platform.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 10.0,
    clients: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent clients.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Run the reviews' demo on a platform that is up."""
    run_demo(url, Media(), seconds=seconds, clients=clients, seed=seed)


if __name__ == "__main__":
    typer.run(main)
