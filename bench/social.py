"""Social network benchmark (WORKLOADS 3, "retwis"): 64 to 192 clients over HTTP. It prints the
median of each function and conflicts, and checks posts and objects against the log.

    python -m bench.social [--seconds 2] [--rounds 5] [--callers 64 96 128 192] [--graph FILE]
"""

from __future__ import annotations

from pathlib import Path

from bench.applications import bench, in_a_loop
from bench.support.harness import arguments
from functions.social.graph import GraphError, read_graph, synthetic_graph
from functions.social.load import SocialNetwork

CLIENTS = (64, 96, 128, 192)
PAPER = {
    192: {
        "load": "  Boki, 8 engines",
        "requests/s": "14,974",
        "login p50": "1.5 ms",
        "profile p50": "1.1 ms",
        "timeline p50": "3.4 ms",
        "post p50": "5.3 ms",
        "conflicts": "0.24%",
    }
}
"""The figures of Boki's authors, by number of clients and column."""

if __name__ == "__main__":
    asked = arguments(
        __doc__,
        callers={"type": int, "nargs": "+", "default": list(CLIENTS), "help": "clients"},
        graph={"type": Path, "default": None, "help": "friendships, two integers a line"},
    )
    try:
        graph = synthetic_graph() if asked.graph is None else read_graph(asked.graph)
    except GraphError as error:
        raise SystemExit(str(error)) from None
    steps = [in_a_loop(clients, PAPER.get(clients, {})) for clients in asked.callers]
    bench(SocialNetwork(graph), steps, asked)
