"""Tasks that visit batches while some of these move to cold storage."""

from __future__ import annotations

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.kernel.cold import VERSION, ColdBatchRead, ColdObject, ReadColdBatch
from indilog.kernel.records import RecordBatch
from indilog.roles.role import AskCold, Effect, Location, ReadFrame
from indilog.wire.messages import IndexData, Message
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT, BatchReads, BatchTask
from tests.unit.storage.machine import batch

RECORDS = 2
OBJECTS = {
    number: ColdObject(VERSION, number, ShardId(0), first, first + RECORDS, 500, 0)
    for number, first in ((1, 0), (2, 2), (3, 4))
}


class Visit(BatchTask):
    """Notes what it is given."""

    def __init__(self, *todo: Location) -> None:
        super().__init__(NodeId("compute-0"), todo)
        self.taken: list[tuple[Location, int | None]] = []

    @property
    def full(self) -> bool:
        return False

    def take(self, location: Location, batch: RecordBatch | None) -> None:
        self.taken.append((location, batch.header.first if batch is not None else None))

    def answer(self) -> Message:
        return IndexData((), Epoch(0))


def cold(number: int) -> Location:
    return Location(FIRST_COLD_SEGMENT + number, OBJECTS[number].first, 100)


def requested(effects: list[Effect]) -> list[tuple[int, int]]:
    """Return the token and the object of each read of cold storage; there are no other reads."""
    found = []
    for effect in effects:
        assert not isinstance(effect, ReadFrame)
        if isinstance(effect, AskCold):
            assert isinstance(effect.request, ReadColdBatch)
            found.append((effect.request.token, effect.request.source.number))
    return found


def test_a_batch_that_moves_while_a_task_waits_for_another_one_is_read_at_its_new_place() -> None:
    reads = BatchReads(
        bytes_max=0, reading_bytes_max=1000, tasks_max=10, cold_max=1, objects=OBJECTS
    )
    local = Location(1, 32, 100)
    visit, other = Visit(cold(1), cold(2), local), Visit(cold(2))
    assert reads.start(visit)
    assert reads.start(other)
    effects = reads.advance()
    reads.note_moved([(local, cold(3)), (Location(1, 132, 100), Location(9, 9, 9))])
    asked = []
    while reading := requested(effects):
        reads.check_invariants()
        ((token, number),) = reading
        asked.append(number)
        payload = batch(OBJECTS[number].first, [b"data"] * RECORDS)
        effects = reads.on_cold_read(ColdBatchRead(token, payload)) + reads.advance()
    assert asked == [1, 2, 3]
    assert visit.taken == [(cold(1), 0), (cold(2), 2), (local, 4)]
    assert other.taken == [(cold(2), 2)]
    assert not reads.damaged
