"""Compares appends to logs of each kind, and appends with fills of an order-first log, in one run.

The platform runs in this process, with `--replicas` storage nodes. With `--processes`, each
sequencer, storage node and index node has a process of its own, and this process is the compute
node. The store of the object-store log is a directory on the same disk. Rounds of the kinds run
interleaved, so all meet the same machine. A fill writes junk into a cell that no writer has
written, along the same chain as an append (CORFU 4.1).

    python -m bench.kinds.appends [--replicas 1 2 3] [--sequencers 1] [--kinds shared owned ...]
                                  [--callers 1 64] [--record-bytes 256] [--rounds 3] [--seconds 2]
                                  [--processes]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.support.harness import Report, Round, closed_loop, command, latency, table_of
from bench.support.platforms import compute_node
from indilog.base.ids import tag_columns
from indilog.base.log import Session
from indilog.base.log_kinds import LOG_KINDS
from indilog.config import ClusterConfig, Config, node_config
from indilog_cells.chain_cells import ChainCells
from indilog_cells.content import JUNK, Content, Records, encode
from indilog_cells.opening import PlatformCells
from indilog_compute.local_log import LocalLogs

_CELLS_LOG: Final = "cells"
"""A log whose cells the benchmark writes itself."""
_PART_BYTES: Final = 1 << 20


class Work(NamedTuple):
    """What the callers of a round do."""

    name: str
    run: Callable[[int], Awaitable[object]]


async def works_of(logs: LocalLogs, data: bytes, chosen: Sequence[str]) -> list[Work]:
    """Create a log of each kind; return an append for each, a write of a cell, and a fill."""
    kinds = logs.kinds
    assert kinds is not None

    def appending(name: str) -> Callable[[int], Awaitable[object]]:
        log = logs.log(name, Session())
        return lambda _: log.append(data, tags=["t"])

    columns = tag_columns(_CELLS_LOG, ("t",))
    works = []
    for kind in chosen:
        await kinds.create(kind, kind)
        works.append(Work(f"append, {kind}", appending(kind)))
    await kinds.create(_CELLS_LOG, "order-first")
    folder = kinds._catalog.logs[_CELLS_LOG].created.folder  # noqa: SLF001 - its cells are written
    nodes = PlatformCells(kinds, folder)
    cells = ChainCells(nodes, nodes, part_bytes=_PART_BYTES, new_part=lambda: 1)
    positions: Iterator[int] = itertools.count()
    record = Records(0, [columns.tags], [columns.names], [data])
    content = encode(
        Content(epoch=1, is_claim=True, writer=b"bench", serial=0, stamp_us=0, items=[record])
    )
    return [
        *works,
        Work("write of a cell", lambda _: cells.write(next(positions), content)),
        Work("fill of a cell", lambda _: cells.write(next(positions), JUNK)),
    ]


async def measure(asked: argparse.Namespace, replicas: int, callers: int) -> dict[str, list[Round]]:
    """Return the rounds of each work."""
    found: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        config = Config(
            cluster=ClusterConfig(
                sequencers=asked.sequencers, storage_nodes=replicas, replicas=replicas
            ),
            node=node_config(data_dir=Path(temporary) / "data"),
        )
        async with compute_node(config, processes=asked.processes) as logs:
            works = await works_of(logs, bytes(asked.record_bytes), asked.kinds)
            for work in works:
                await work.run(0)
            for _ in range(asked.rounds):
                for work in works:
                    measured = await closed_loop(work.run, callers=callers, seconds=asked.seconds)
                    found.setdefault(work.name, []).append(measured)
    return found


def middle(values: list[float]) -> float:
    """Return the median; 0 if there are no values."""
    return sorted(values)[len(values) // 2] if values else 0.0


async def main(asked: argparse.Namespace) -> None:
    """Measure each number of replicas and of callers; print a table."""
    report = Report("appends to logs of each kind", asked)
    table = table_of(
        "medians of the rounds",
        "replicas",
        "callers",
        "what",
        "per second",
        "p50",
        "p99",
        "p50 ÷ shared",
    )
    for replicas, callers in itertools.product(asked.replicas, asked.callers):
        found = await measure(asked, replicas, callers)
        shared_p50 = middle([each.quantile(0.5) for each in found.get("append, shared", [])])
        for name, rounds in found.items():
            p50 = middle([each.quantile(0.5) for each in rounds])
            p99 = middle([each.quantile(0.99) for each in rounds])
            rate = middle([each.per_second for each in rounds])
            ratio = f"{p50 / shared_p50:.2f}" if shared_p50 else ""
            cells = f"{replicas}", f"{callers:,}", name, f"{rate:,.0f}", latency(p50), latency(p99)
            table.add_row(*cells, ratio)
            report.keep(f"{name}, {replicas} replicas, {callers} callers", {"p50_s": p50})
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        replicas={"type": int, "nargs": "+", "default": [1, 2, 3], "help": "storage nodes"},
        processes={"action": "store_true", "help": "a process for each node"},
        sequencers={"type": int, "default": 1, "help": "sequencers, for the shared log"},
        kinds={"nargs": "+", "choices": LOG_KINDS, "default": LOG_KINDS, "help": "kinds of log"},
        callers={"type": int, "nargs": "+", "default": [1, 64], "help": "callers"},
        record_bytes={"type": int, "default": 256, "help": "bytes of a record"},
        rounds={"type": int, "default": 3, "help": "rounds of each kind"},
        seconds={"type": float, "default": 2.0, "help": "length of a round"},
    )
