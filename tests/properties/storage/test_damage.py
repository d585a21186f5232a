"""A5: with any damage in its files a replica starts, serves intact records, and is repaired from
the other replica. It never returns a record that was not written.

The journal is the real one; the other replica, which is intact, is a storage node over frames in
memory. The expected records come from the appends alone.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import Epoch, NodeId
from indilog.kernel.metalog import Entry
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Effect,
    Event,
    FrameRead,
    Persist,
    Persisted,
    ReadFrame,
    Send,
    Started,
)
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.recovery import recover
from indilog.wire.messages import AppendBatch, ReadRecords, RecordsRead
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    append,
    batch,
    config_of,
    entry,
    messages,
    new_writers,
)

A, B = NodeId("storage-0"), NodeId("storage-1")
VIEW = view_of(storage_nodes=2, replicas=2)
CONFIG = config_of(ordering_frame_entries=3, record_cache_bytes_max=0)
SEGMENT_BYTES = 2048
HALF = 12
"""Batches of each of two writers."""
BATCHES = 2 * HALF
DATA = [[b"%d/%d " % (number, place) * 4 for place in range(2)] for number in range(BATCHES)]
RECORDS = [data for pair in DATA for data in pair]
METALOG: tuple[Entry, ...] = (
    new_writers(0),
    *(entry(1 + number, {SHARD: 2}) for number in range(HALF)),
    new_writers(1 + HALF, 2),
    *(entry(2 + HALF + number, {SHARD: 2}) for number in range(HALF)),
)


class OnDisk(Machine):
    """A storage node over a journal in `directory`."""

    def __init__(self, directory: Path, node: NodeId) -> None:
        super().__init__(VIEW, CONFIG, node)
        self.journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
        recover(self.journal, {stream_of(node): self.node})
        self.started = self.turn(Started(Epoch(1)))

    def _perform(self, effect: Effect, sent: list[Send]) -> list[Event]:
        if not hasattr(self, "journal"):
            return []
        match effect:
            case Persist(kind, payload, token):
                location = self.journal.write(stream_of(self.name), kind, payload)
                return [Persisted(token, location)]
            case ReadFrame(location, token):
                return [FrameRead(token, self.journal.read(location))]
            case _:
                return super()._perform(effect, sent)


@contextmanager
def on_disk(directory: Path, node: NodeId) -> Iterator[OnDisk]:
    machine = OnDisk(directory, node)
    try:
        yield machine
    finally:
        machine.journal.close()


def tell_entries(machine: Machine, end: int) -> list[Send]:
    """Deliver the entries below `end`."""
    return machine.tell(entries_message(METALOG[:end]), sender=PRIMARY)


def load(machine: Machine) -> None:
    """Append all records under two writers. Each batch has an entry of its own, which is applied
    after the next batch was stored.

    The first writer also stores a batch beyond its half. No entry orders it, and the entry of the
    second writer drops it.
    """
    for number, data in enumerate(DATA):
        half, of_half = divmod(number, HALF)
        begun = 1 + half * (1 + HALF)
        if not of_half:
            tell_entries(machine, begun - half)
            if half:
                append(machine, b"stale", b"stale", b"stale", first=2 * number)
            tell_entries(machine, begun)
        machine.tell(AppendBatch(batch(2 * number, data, epoch=1 + half)))
        tell_entries(machine, begun + of_half)


@functools.cache
def intact() -> dict[str, bytes]:
    """The files of the replica before any damage."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "journal"
        with on_disk(directory, A) as machine:
            load(machine)
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@functools.cache
def other() -> tuple[Machine, ...]:
    machine = Machine(VIEW, CONFIG, B)
    load(machine)
    return (machine,)


def repaired(machine: Machine) -> None:
    """Bring the metalog up to date, and let the other replica answer until no request is open."""
    sent = machine.started
    sent += tell_entries(machine, len(METALOG))
    (peer,) = other()
    tell_entries(peer, len(METALOG))
    for _ in range(200):
        asked = [send.message for send in sent if send.to == B]
        if not asked and machine.node.status()["missing_records"] == 0:
            return
        answers = messages(peer.tell(*asked, sender=A), A)
        sent = machine.tell(*answers, sender=B) + machine.wait(1.0)
    raise AssertionError("it is not repaired")


def check_reads(machine: Machine, *, all_known: bool) -> None:
    for seqnum, data in enumerate(RECORDS):
        sent = machine.tell(ReadRecords(1, ENGINE, SHARD, (seqnum,)))
        for answer in messages(sent, ENGINE):
            assert isinstance(answer, RecordsRead)
            found = [record.data for record in answer.records]
            assert found == [data] or (not found and not all_known), seqnum


def check(spoilt: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as temporary, structlog.testing.capture_logs():
        directory = Path(temporary)
        for name, data in spoilt.items():
            (directory / name).write_bytes(data)
        for _ in range(2):
            with on_disk(directory, A) as machine:
                check_reads(machine, all_known=False)
                repaired(machine)
                check_reads(machine, all_known=True)


def used(name: str, data: bytes) -> int:
    """Return the used length of a file: the rest is zeros."""
    return max(1, len(data.rstrip(b"\0"))) if name.startswith("segment-") else len(data)


@given(st.data())
def test_one_flipped_bit_in_any_file_loses_no_record(data: st.DataObject) -> None:
    files = dict(intact())
    name = data.draw(st.sampled_from([name for name, text in files.items() if text]))
    spoilt = bytearray(files[name])
    bit = data.draw(st.integers(0, 8 * used(name, files[name]) - 1))
    spoilt[bit // 8] ^= 1 << bit % 8
    check(files | {name: bytes(spoilt)})


@given(st.data())
def test_damaged_sectors_lose_no_record_that_another_replica_has(data: st.DataObject) -> None:
    files = dict(intact())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([n for n in files if n.startswith("segment-")]))
        spoilt = bytearray(files[name])
        start = data.draw(st.integers(0, len(spoilt) - 1))
        size = data.draw(st.integers(1, 700))
        filler = data.draw(st.sampled_from([b"\0", b"\xff", b"IL", b"ILRB\x01"]))
        spoilt[start : start + size] = (filler * size)[: len(spoilt[start : start + size])]
        files[name] = bytes(spoilt)
    check(files)


def test_a_wiped_directory_is_restored_from_another_replica() -> None:
    """A4: the whole directory of one replica is removed."""
    check({})
