"""Runs the demo on a running platform: starts the services, loads the stock, lets customers order,
checks the result, shows a table.

`python -m functions.orders.demo --url http://127.0.0.1:8080 --seconds 10`; the app must be deployed
(`indilog deploy functions/orders`). The exit code is 1 if the check finds a fault. The services run
on this machine, and end with the demo.
"""

from __future__ import annotations

from typing import Annotated

import typer

from functions.orders.load import Orders
from functions.orders.outside import services
from functions.workload.demonstration import run_demo


def main(
    url: Annotated[str, typer.Option(help="URL of the platform.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 10.0,
    clients: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent clients.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
    failing: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the services' requests that fail.")
    ] = 0.2,
) -> None:
    """Run the shop's demo on a platform that is up."""
    with services(seed=seed, failing=failing) as running:
        run_demo(url, Orders(running), seconds=seconds, clients=clients, seed=seed)


if __name__ == "__main__":
    typer.run(main)
