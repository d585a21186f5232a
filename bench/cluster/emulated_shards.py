"""Measures how many shards the ordering tier serves (Scalog 6.3, Figure 5: emulated storage).

The three sequencers are real processes, which sync their metalog. This process emulates all other
nodes. For each shard there are a compute node and a storage node, with connections of their own. A
storage node has replicas of two shards. Every `--interval-ms` it reports the progress that a real
one would make at 15,000 records a second for each shard, without receiving any record.

For each number of shards, the table has the time from a report to the cut that orders it. It also
has the processor time of the primary for a cut and for a report, and the share of one core that
the primary and this process use. Where that share is near 1, the figures are those of an overload.

    python -m bench.cluster.emulated_shards [--shards 2 6 12 24 48] [--interval-ms 2]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import configured, usage_of
from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.base.telemetry import configure_logging
from indilog.config import Config
from indilog.kernel.metalog import Entry, NewWriters
from indilog.kernel.view import View
from indilog.runtime.cluster.cluster_state import NodeStart, node_start
from indilog.runtime.cluster.layout import wanted_view
from indilog.runtime.cluster.metadata_address import metadata_at
from indilog.runtime.cluster.supervisor import supervised
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.wire.envelope import decode_envelope, encode_message, pack_envelope
from indilog.wire.messages import Message, MetalogEntries, ShardProgress, ShardWanted, TermIs

RECORDS_PER_S: Final = 15_000
"""The load of a shard in Scalog's experiment."""
REPLICAS: Final = 2
_RESEND_S: Final = 0.2
_STARTS_S: Final = 60.0
_REPORTS_WAITING_MAX: Final = 10_000
_BEGAN: Final = time.perf_counter()


class EmulatedNode:
    """An emulated node: its connections to the sequencers."""

    def __init__(self, name: NodeId, start: NodeStart, config: Config) -> None:
        self.name = name
        self._epoch = start.epoch
        sequencers = {node: start.addresses[node] for node in start.view.sequencers}
        loop = asyncio.get_running_loop()
        self._transport = StreamTransport(start.addresses[name], sequencers, loop, config)
        self._transport.start(self._on_frames)
        self.close = self._transport.close

    def _on_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.on_frame(frame)

    def on_frame(self, frame: bytes) -> None:
        """Handle a frame of a sequencer."""

    def send(self, to: NodeId, message: Message) -> None:
        """Send a message at once."""
        frame = pack_envelope(self._epoch, self.name, to, [encode_message(message)])
        self._transport.send(to, frame)
        self._transport.flush()


class EmulatedStorageNode(EmulatedNode):
    """Reports the progress of its shards, as if records were appended to them all the time.

    Attributes:
        latencies_s: seconds from each report to the cut that orders all of it.
        cuts: number of entries that ordered records of its first shard.
        reports: number of reports sent.
        writers: the writer of each of its shards; 0: none yet.
        primary: the primary of the newest known term.
    """

    def __init__(
        self,
        name: NodeId,
        shards: Collection[ShardId],
        start: NodeStart,
        config: Config,
        interval_s: float,
    ) -> None:
        super().__init__(name, start, config)
        self.primary = start.view.sequencers[0]
        self.writers = dict.fromkeys(shards, Epoch(0))
        self.latencies_s: list[float] = []
        self.cuts = self.reports = 0
        self._term = Epoch(0)
        self._interval_s = interval_s
        self._ordered = dict.fromkeys(shards, 0)
        self._waiting: deque[tuple[int, float]] = deque(maxlen=_REPORTS_WAITING_MAX)
        """For each report: the number of records of each shard in it, and when it was sent."""
        self._reporting = asyncio.create_task(self._report())

    def on_frame(self, frame: bytes) -> None:
        """Learn the term, the writers, and what is ordered."""
        for message in decode_envelope(frame).messages:
            match message:
                case TermIs(term=term, primary=primary) if term > self._term:
                    self._term, self.primary = term, primary
                case MetalogEntries(entries=entries):
                    for entry in entries:
                        self._apply(entry)
                case _:
                    pass

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, NewWriters):
            self.writers |= {s: w for s, w in entry.writers.items() if s in self.writers}
            return
        first = next(iter(self.writers))
        self.cuts += first in entry.counts
        for shard, count in entry.counts.items():
            if shard in self._ordered:
                self._ordered[shard] += count
        end, now = min(self._ordered.values()), time.perf_counter()
        while self._waiting and self._waiting[0][0] <= end:
            self.latencies_s.append(now - self._waiting.popleft()[1])

    async def _report(self) -> None:
        """Report periodically. At any time, all replicas of a shard report the same records."""
        while True:
            stored = 0
            if all(self.writers.values()):
                stored = int((time.perf_counter() - _BEGAN) * RECORDS_PER_S)
                self._waiting.append((stored, time.perf_counter()))
            reported = {shard: (writer, stored) for shard, writer in self.writers.items()}
            self.send(self.primary, ShardProgress(self._term, reported))
            self.reports += 1
            await asyncio.sleep(self._interval_s if stored else _RESEND_S)

    def forget(self) -> None:
        """Begin the figures anew."""
        self.latencies_s.clear()
        self.cuts = self.reports = 0

    def stop(self) -> None:
        """Stop reporting."""
        self._reporting.cancel()
        self.close()


async def _open_shards(
    writers: Mapping[ShardId, EmulatedNode],
    replicas: Sequence[EmulatedStorageNode],
    start: NodeStart,
) -> None:
    """Request all shards, until the primary has named all writers."""
    async with asyncio.timeout(_STARTS_S):
        while not all(all(node.writers.values()) for node in replicas):
            for shard, node in writers.items():
                for sequencer in start.view.sequencers:
                    node.send(sequencer, ShardWanted(shard, start.epoch))
            await asyncio.sleep(_RESEND_S)


def _config_of(path: str, shards: int) -> Config:
    cluster = {
        "sequencers": 3, "storage_nodes": shards, "replicas": REPLICAS,
        "engines": shards, "index_shards": 1,
    }  # fmt: skip
    return configured(path, processes=True, cluster=cluster, node={"storage_lost_s": 3600.0})


def _emulated(view: View) -> list[NodeId]:
    return [*view.storage_nodes, *view.engines, *view.index_nodes, *view.aggregators]


async def measure(report: Report, shards: int, asked: argparse.Namespace) -> list[str]:
    """Return the row of one number of shards."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = _config_of(path, shards)
        view = wanted_view(config)
        async with (
            supervised(config, left_out=_emulated(view)) as cluster,
            metadata_at(cluster.metadata_address) as store,
        ):
            start = await node_start(store)
            of = {
                node: [s for s, placed in start.view.shards.items() if node in placed.replicas]
                for node in start.view.storage_nodes
            }
            replicas = [
                EmulatedStorageNode(node, shards_of, start, config, asked.interval_ms / 1e3)
                for node, shards_of in of.items()
            ]
            writers = {
                s: EmulatedNode(p.writer, start, config) for s, p in start.view.shards.items()
            }
            others = [
                EmulatedNode(n, start, config) for n in (*view.index_nodes, *view.aggregators)
            ]
            await _open_shards(writers, replicas, start)
            await asyncio.sleep(asked.seconds / 4)
            primary = cluster.processes[replicas[0].primary].pid
            assert primary is not None, "it runs"
            for replica in replicas:
                replica.forget()
            pids = (primary, os.getpid())
            before, began = [usage_of(pid).cpu_s for pid in pids], time.perf_counter()
            await asyncio.sleep(asked.seconds)
            took = time.perf_counter() - began
            after = [usage_of(pid).cpu_s for pid in pids]
            latencies = sorted(at for replica in replicas for at in replica.latencies_s)
            cuts = max(replica.cuts for replica in replicas)
            reports = sum(replica.reports for replica in replicas)
            for node in (*replicas, *writers.values(), *others):
                node.stop() if isinstance(node, EmulatedStorageNode) else node.close()
    used = [b - a for a, b in zip(before, after, strict=True)]
    report.keep(str(shards), [latencies[:: max(1, len(latencies) // 1000)], cuts, reports, used])
    return [
        str(shards),
        f"{shards * RECORDS_PER_S:,}",
        latency(statistics.median(latencies)),
        latency(latencies[int(len(latencies) * 0.99)]),
        f"{cuts / took:,.0f}",
        f"{reports / took:,.0f}",
        f"{used[0] / cuts * 1e6:,.0f} µs",
        f"{used[0] / reports * 1e6:,.0f} µs",
        f"{used[0] / took:.2f}",
        f"{used[1] / took:.2f}",
    ]


async def main(asked: argparse.Namespace) -> None:
    """Measure each number of shards, one after the other."""
    configure_logging("console", "error")
    report = Report("emulated shards", asked, replicas=REPLICAS, records_per_s=RECORDS_PER_S)
    columns = ("records/s", "p50", "p99", "cuts/s", "reports/s", "a cut", "a report")
    table = table_of(
        f"a report every {asked.interval_ms:g} ms", "shards", *columns, "primary", "emulator"
    )
    for shards in asked.shards:
        table.add_row(*await measure(report, shards, asked))
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        shards={"type": int, "nargs": "+", "default": [2, 6, 12, 24, 48]},
        interval_ms={"type": float, "default": 2.0, "help": "time between two reports of a node"},
    )
