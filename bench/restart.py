"""Measures how long a start takes, by how the log was written (decision 0028).

Two simulated callers fill a data directory with single records or batches. The real storage node,
sequencer, index node and journal run in this process, iteration by iteration, without waiting for
syncs, engines or sockets. Then another process opens the directory. It is timed from its start to
the first record read: wall-clock and processor seconds, including imports. With `--killed` the
filling ends without a checkpoint, so that the start must replay the frames after the last
checkpoint.

    python -m bench.restart [--records 1000000] [--batch 1] [--killed] [--opens 3] [--keep DIR]

`bytes_per_record` has the bytes of the journal (without prepared zeros), of checkpoints and of
index snapshots, divided by the number of records. A record has 100 bytes of data.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import indilog.client
from indilog.base.ids import Epoch, Instant, LocalId, NodeId, ShardId, tag_columns
from indilog.config import ClusterConfig, Config, NodeConfig
from indilog.kernel.index_snapshot import WriteSnapshot, without_snapshots
from indilog.kernel.records import BatchBuilder
from indilog.kernel.view import view_of
from indilog.roles.role import (
    AskSnapshots,
    Effect,
    Event,
    FrameRead,
    Persist,
    Persisted,
    ReadFrame,
    Received,
    Send,
    SnapshotsAnswered,
    Started,
    TermBegun,
)
from indilog.runtime.cluster.assembly import role_of
from indilog.runtime.cluster.cluster_state import EPOCH_KEY
from indilog.runtime.cluster.metadata_opening import opened_metadata
from indilog.runtime.journal.checkpointing import Checkpointing
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.recovery import recover
from indilog.runtime.snapshot_files import SnapshotFolder
from indilog.wire.messages import AppendBatch, Message, ShardWanted

RECORD_BYTES: Final = 100
TAGS: Final = 1000
_LOG: Final = "orders"
_BORN: Final = "INDILOG_BENCH_BORN"
"""Environment variable with the time at which the measured process was started."""


class Filler:
    """The roles of an embedded platform except its engine, over its journal."""

    def __init__(self, config: Config, epoch: Epoch) -> None:
        self._config = config
        node = config.node
        self._journal = Journal.open(
            node.data_dir / "journal", segment_bytes=node.journal.segment_bytes, durability="memory"
        )
        self._view = view_of()
        names = [n for n in self._view.nodes if n not in self._view.engines]
        self._roles = {name: role_of(name, [self._view], config) for name in names}
        streams = {stream_of(name): role for name, role in self._roles.items()}
        recover(self._journal, streams)
        self._checkpointing = Checkpointing(
            self._journal, streams, lambda _: None, frames=node.journal.checkpoint_frames
        )
        self._checkpointing.start()
        self._folders = {
            name: SnapshotFolder(node.data_dir / "snapshots" / name)
            for name in self._view.index_nodes
        }
        self._inbox: dict[NodeId, list[Event]] = {}
        self._epoch = epoch
        self._now = time.time()
        for name in self._roles:
            self._tell(name, Started(epoch))
            self._tell(name, TermBegun(epoch, self._view.sequencers[0]))
        self.run()

    def _tell(self, node: NodeId, event: Event) -> None:
        self._inbox.setdefault(node, []).append(event)

    def say(self, to: NodeId, message: Message) -> None:
        """Send a message of the engine."""
        self._tell(to, Received(self._view.engines[0], message, self._epoch))

    def run(self) -> None:
        """Call roles until no role has events left, as in one iteration of the shell."""
        self._now += 0.0005
        while self._inbox:
            node = next(iter(self._inbox))
            for effect in self._roles[node].handle(self._inbox.pop(node), Instant(self._now)):
                self._perform(node, effect)
        self._journal.flush()
        self._checkpointing.advance(quiet=True)
        if self._checkpointing.busy:
            self._journal.sync()

    def _perform(self, node: NodeId, effect: Effect) -> None:
        match effect:
            case Send(to, message) if to in self._roles:
                self._tell(to, Received(node, message, self._epoch))
            case Persist(kind, payload, token):
                location = self._journal.write(stream_of(node), kind, payload)
                self._tell(node, Persisted(token, location))
            case ReadFrame(location, token):
                self._tell(node, FrameRead(token, self._journal.read(location)))
            case AskSnapshots(WriteSnapshot() as request):
                self._tell(node, SnapshotsAnswered(self._folders[node].write(request)))
            case AskSnapshots(request):
                self._tell(node, SnapshotsAnswered(without_snapshots(request)))
            case _:
                pass  # for engines or operators

    def fill(self, records: int, batch: int) -> None:
        """Append `records` records in batches of `batch`, by two concurrent callers."""
        shard, storage = ShardId(0), self._view.storage_nodes[0]
        self.say(self._view.sequencers[0], ShardWanted(shard, self._epoch))
        self.run()
        first: LocalId = 0
        while first < records:
            for _ in range(2):
                self.say(storage, AppendBatch(_batch(shard, self._epoch, first, batch)))
                first += batch
            self.run()

    def close(self, *, killed: bool) -> None:
        """Stop, with a checkpoint or without."""
        if not killed:
            self._checkpointing.stop(quiet=True)
        self._journal.close()


def _batch(shard: ShardId, epoch: Epoch, first: LocalId, records: int) -> bytes:
    builder = BatchBuilder()
    for number in range(first, first + records):
        columns = tag_columns(_LOG, (f"t{number % TAGS}",))
        builder.add(b"x" * RECORD_BYTES, columns)
    return builder.build(shard=shard, epoch=epoch, first=first, time_us=int(time.time() * 1e6))


def filled(directory: Path, records: int, batch: int, *, killed: bool) -> None:
    """Fill a new data directory."""
    config = _config(directory)

    async def founded() -> Epoch:
        """Let a platform make the directory; return an epoch of its own for the filler."""
        async with indilog.client.open(directory, config):
            pass
        async with opened_metadata(config.node) as metadata:
            return Epoch(await metadata.store.next_sequence(EPOCH_KEY))

    filler = Filler(config, asyncio.run(founded()))
    filler.fill(records, batch)
    filler.close(killed=killed)


def _config(directory: Path) -> Config:
    return Config(cluster=ClusterConfig(durability="memory"), node=NodeConfig(data_dir=directory))


async def reopen(directory: Path) -> None:
    """Open the directory in this new process, and print how long that took."""
    async with indilog.client.open(directory, _config(directory)) as client:
        born = float(os.environ[_BORN])
        ready_s, cpu_s = time.time() - born, time.process_time()
        record = await client.log(_LOG).read_prev(f"t{TAGS - 1}")
        read_s, last = time.time() - born, record.seqnum if record is not None else None
        result = {"ready_s": ready_s, "ready_cpu_s": cpu_s, "read_s": read_s, "last": last}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        os._exit(0)  # leaves the directory as it was, without a checkpoint or snapshot


def bytes_of(directory: Path) -> dict[str, int]:
    """Return how many bytes the parts of a directory take on the disk."""
    journal = directory / "journal"
    parts = {
        "segments": journal.glob("segment-*"),
        "checkpoints": journal.glob("checkpoint-*"),
        "snapshots": directory.glob("snapshots/*/*"),
    }
    return {name: sum(map(_used, paths)) for name, paths in parts.items()}


def _used(path: Path) -> int:
    """Return the size of a file without zeros at its end."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while end:
            start = max(0, end - (1 << 20))
            file.seek(start)
            if part := file.read(end - start).rstrip(b"\0"):
                return start + len(part)
            end = start
    return 0


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("bench.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1, help="records in a batch")
    parser.add_argument("--killed", action="store_true", help="without a checkpoint at the end")
    parser.add_argument("--opens", type=int, default=3, help="how often it is opened")
    parser.add_argument("--keep", type=Path, help="the directory, which stays and is used again")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.open is not None:
        asyncio.run(reopen(asked.open))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.keep or Path(temporary) / "data"
        began, began_cpu = time.time(), time.process_time()
        if not directory.exists():
            filled(directory, asked.records, asked.batch, killed=asked.killed)
        fill_s, fill_cpu_s = time.time() - began, time.process_time() - began_cpu
        per_record = {n: round(s / asked.records, 2) for n, s in bytes_of(directory).items()}
        result = {"records": asked.records, "batch": asked.batch, "bytes_per_record": per_record}
        _tell(result | {"fill_s": round(fill_s, 1), "fill_cpu_s": round(fill_cpu_s, 1)})
        _opened_apart(directory, Path(temporary))  # so that all modules are compiled
        for _ in range(asked.opens):
            _tell(json.loads(_opened_apart(directory, Path(temporary))))


def _opened_apart(directory: Path, modules: Path) -> bytes:
    """Open the directory in a process of its own; return what it prints.

    Python finds its modules compiled, as an installed platform does, in the folder `modules`.
    """
    command = [sys.executable, "-m", "bench.restart", "--open", str(directory)]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(modules), _BORN: repr(time.time())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def _tell(figures: object) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
