"""Runs the demo on a running platform: loads a graph, runs the load, checks the result, shows a
table.

`python -m functions.social.demo --url http://127.0.0.1:8080 --seconds 10 [--graph FILE]`; the app
must be deployed (`indilog deploy functions/social`). The exit code is 1 if the check finds a fault.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from functions.social.graph import GraphError, read_graph, synthetic_graph
from functions.social.load import SocialNetwork
from functions.workload.demonstration import run_demo


def main(
    url: Annotated[str, typer.Option(help="URL of the platform.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 10.0,
    graph: Annotated[
        Path | None,
        typer.Option(
            help="File with two integers per line, a friendship; default: a generated graph."
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent clients.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Run the social network's demo on a platform that is up."""
    try:
        friends = synthetic_graph(seed=seed) if graph is None else read_graph(graph)
    except GraphError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(2) from None
    run_demo(url, SocialNetwork(friends), seconds=seconds, clients=clients, seed=seed)


if __name__ == "__main__":
    typer.run(main)
