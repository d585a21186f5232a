"""Moves old records of a storage node to objects on cold storage, and deletes an object when all
its records are trimmed (decision 0039).

A move has four steps:

1. The node reads consecutive batches of a shard that are due: they are older than `cold_after_s`,
   or the batches on disk exceed `cold_local_bytes_max`.
2. A thread writes the batches as one object.
3. A `COLD` frame in the journal, the *note*, names the object. From then on the shard locates these
   batches in the object.
4. The frames of the batches are now reclaimable, and the next rewrite of their segments leaves them
   out.

A crash before step 3 leaves an object without a note, which the next start deletes. A crash after
step 3 leaves frames that the next start reports as reclaimable.

A restart from a damaged journal may lose metalog entries after the older of the node's two newest
checkpoints (`Covered`). So only records that the older checkpoint covers are moved, because their
order stays known. The node writes one object at a time. Each replica moves its own copy, so damage
to an object is repaired from another replica.

One record of an object is its *witness*. While the witness is not trimmed, the object stays, and
the node does not read the tags of the other records. When the witness is trimmed, the node reads
all tags of the object. The newest record that is not trimmed then becomes the witness. If all
records are trimmed, the object is deleted.

`DiskCare` runs `ColdTier`. `ColdTier` changes the shards, and asks the shell by `AskCold` effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

import msgspec
import numpy as np

from indilog.base.ids import HASH_BYTES, Epoch, Instant, LocalId, SeqNum, ShardId
from indilog.config import KIB, NodeConfig
from indilog.kernel.cold import (
    ColdAnswer,
    ColdBatch,
    ColdBatchRead,
    ColdObject,
    ColdTags,
    ColdTagsRead,
    DeleteObject,
    ListObjects,
    ObjectDeleted,
    ObjectsListed,
    ObjectWritten,
    ReadColdTags,
    WriteObject,
    encode_cold_object,
)
from indilog.kernel.tombstones import GoneRecords, encode_gone
from indilog.roles.role import (
    AskCold,
    Discard,
    Effect,
    FrameKind,
    Ignore,
    Location,
    Persist,
    ReadFrame,
)
from indilog_storage.batch_reads import parse_batch
from indilog_storage.checkpoint import Covered
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering
from indilog_storage.shard import COLD_OBJECTS_MAX, Shard
from indilog_storage.shard_parts import LocalBatches

FIRST_TOKEN: Final = -(1 << 61)
"""The tokens of this module's reads and frames count down from here. Other modules use other
ranges, so a token shows which module it belongs to.
"""
_CHUNK_BYTES: Final = 256 * KIB
_BATCHES_MAX: Final = 64
"""Largest number of batches that one step reads. `_CHUNK_BYTES` limits its bytes."""
_BATCH_REST_S: Final = 0.0002
"""Least pause after a step of reading, in seconds, for each batch that the step read."""
_LOOK_S: Final = 1.0
"""Seconds between two searches for records to move."""
_WITNESSES_MAX: Final = 256
"""Objects whose witness is checked in one step."""
_CHECK_REST_S: Final = 0.01
"""Seconds between two steps that check witnesses."""


class ColdObjectsKept:
    """The objects of a node according to its notes; recovery and checkpoints restore them.

    Attributes:
        objects: the objects, by number.
        released: former places of the batches that recovery found in objects.
        may_lack_notes: whether a note may have been lost; an object without a note is then kept.
    """

    def __init__(self) -> None:
        self.objects: dict[int, ColdObject] = {}
        self.released: list[Location] = []
        self.may_lack_notes = False

    def note(self, made: ColdObject, shard: Shard | None) -> list[tuple[Location, Location]]:
        """Note that batches of a shard are now in an object. Return the former and the new place of
        each batch. If `shard` is None, this node does not keep the shard, and nothing is noted.
        """
        if shard is None:
            return []
        self.objects[made.number] = made
        return shard.move(made.first, made.end, made.number)

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(made.size_bytes for made in self.objects.values())


class _Gathering:
    """Consecutive batches of a shard (the run) that are read, and then written as one object.

    Attributes:
        asked: number of the run's batches that were requested.
        payloads: the batches that were read, in order.
        awaited: tokens of the reads in progress.
        is_writing: whether the cold store was asked to write the object.
    """

    def __init__(self, shard: Shard, run: LocalBatches) -> None:
        self.shard = shard
        self.run = run
        self.asked = 0
        self.payloads: list[bytes] = []
        self.awaited: set[int] = set()
        self.is_writing = False


class ColdTier:
    """Moves records of one node to cold storage, and deletes objects there.

    Attributes:
        moved_bytes: bytes of the batches that were moved in this incarnation.
        deleted: objects deleted in this incarnation.
    """

    def __init__(
        self,
        kept: ColdObjectsKept,
        moved: MovedShards,
        ordering: Ordering,
        covered: Covered,
        config: NodeConfig,
    ) -> None:
        self._kept = kept
        self._shards: Mapping[ShardId, Shard] = moved.shards
        self._shard = moved.kept_or_dropped
        self._ordering = ordering
        self._covered = covered
        self._config = config.cold
        self._started = False
        self._released: list[Location] = []
        """Former places of batches that recovery found on cold storage. The shell has not been
        notified of them yet.
        """
        self._is_listed = False
        self._is_asking = False
        """Whether the store was asked for a list, or for the tags of an object."""
        self._next_number = 1
        self._gathering: _Gathering | None = None
        self._notes: dict[int, ColdObject] = {}
        """Objects to be noted, by the token of their note."""
        self._drops: dict[int, ColdObject] = {}
        """Objects to be deleted, by the token of the note that their last records are discarded."""
        self._last_token = FIRST_TOKEN
        self._unfit: dict[ShardId, LocalId] = {}
        """By shard, the end of the records that stay on this disk because they cannot be moved."""
        self._to_check: list[int] = []
        self._to_read: ColdObject | None = None
        self._move_at = self._check_at = Instant(0.0)
        self._stamp: tuple[int, Instant] = 0, Instant(0.0)
        """The newest stamp of the log, and when this node noticed that stamp."""
        self._moved: list[tuple[Location, Location]] = []
        self.moved_bytes = 0
        self.deleted = 0

    @property
    def _is_used(self) -> bool:
        return bool(self._config.cold_place or self._kept.objects)

    def start(self, now: Instant) -> None:
        """Begin after recovery."""
        self._started = True
        self._released, self._kept.released = self._kept.released, []
        self._next_number = max(self._kept.objects, default=0) + 1
        self._move_at = self._check_at = now
        self.note_risen_floors()

    def note_risen_floors(self) -> None:
        """Note that floors have risen: objects may be trimmed."""
        self._to_check = list(self._kept.objects)

    def _token(self) -> int:
        self._last_token -= 1
        return self._last_token

    def conclude(self, now: Instant) -> list[Effect]:
        """Do the next step of everything that is due."""
        if not self._started or not self._is_used:
            return []
        released, self._released = self._released, []
        effects: list[Effect] = [Discard(place, elsewhere=True) for place in released]
        if not self._is_listed:
            return effects + self._list(now)
        if now >= self._check_at:
            effects += self._check(now)
        if now >= self._move_at:
            effects += self._move(now)
        return effects

    def deadline(self) -> Instant | None:
        """When to continue."""
        if not self._started or not self._is_used:
            return None
        times = []
        if (self._to_check or self._to_read or not self._is_listed) and not self._is_asking:
            times.append(self._check_at)
        if self._is_listed and self._config.cold_place and not self._is_waiting:
            times.append(self._move_at)
        return min(times, default=None)

    @property
    def _is_waiting(self) -> bool:
        """Whether a move waits for a read, the store, or its note."""
        gathering = self._gathering
        if self._notes:
            return True
        return gathering is not None and (gathering.is_writing or bool(gathering.awaited))

    # --- the objects at the start

    def _list(self, now: Instant) -> list[Effect]:
        if self._is_asking or now < self._check_at:
            return []
        self._is_asking = True
        return [AskCold(ListObjects(is_first=not self._kept.objects))]

    def _on_list(self, answer: ObjectsListed, now: Instant) -> list[Effect]:
        """Delete objects that no note names, except those that may be the only copy of their
        records.
        """
        self._is_asking = False
        if answer.objects is None:
            self._check_at = self._retry_at(now)
            return []
        self._is_listed = True
        effects: list[Effect] = []
        for found in answer.objects:
            self._next_number = max(self._next_number, found.number + 1)
            if found.number in self._kept.objects:
                continue
            shard = self._shards.get(found.shard)
            if shard is None or shard.lacks_any(found.first, found.end):
                effects.append(Ignore(found, "an object on cold storage has records lost here"))
            elif self._kept.may_lack_notes and found.end <= shard.ordered:
                effects += self._note(found)
            else:
                effects.append(AskCold(DeleteObject(found)))
        return effects

    def _retry_at(self, now: Instant) -> Instant:
        return Instant(now + self._config.cold_retry_s)

    # --- moving

    def _move(self, now: Instant) -> list[Effect]:
        if not self._config.cold_place or self._is_waiting:
            return []
        if self._gathering is None:
            self._move_at = Instant(now + _LOOK_S)
            if (found := self._find_due(now)) is None or self._next_number >= COLD_OBJECTS_MAX:
                return []
            self._gathering = _Gathering(*found)
        gathering = self._gathering
        if gathering.asked == len(gathering.run.batches):
            return self._write(gathering)
        effects: list[Effect] = []
        size = 0
        while (
            gathering.asked < len(gathering.run.batches)
            and size < _CHUNK_BYTES
            and len(effects) < _BATCHES_MAX
        ):
            _, place = gathering.run.batches[gathering.asked]
            gathering.asked += 1
            size += place.length
            token = self._token()
            gathering.awaited.add(token)
            effects.append(ReadFrame(place, token))
        rest_s = max(size / self._config.cold_bytes_per_s, _BATCH_REST_S * len(effects))
        self._move_at = Instant(now + rest_s)
        return effects

    def _find_due(self, now: Instant) -> tuple[Shard, LocalBatches] | None:
        """Return a shard and its consecutive batches for one object; None: too few are due."""
        covered = self._ordering.tail_before(
            min(self._covered.older.length, self._ordering.position)
        )
        by_age = min(covered, self._tail_of_old(now)) if self._config.cold_after_s else 0
        by_size = covered if self._has_too_many_bytes() else 0
        for shard in self._shards.values():
            if (found := self._run_of(shard, max(by_age, by_size))) is not None:
                return shard, found
        return None

    def _tail_of_old(self, now: Instant) -> SeqNum:
        """Return the seqnum below which all records are older than `cold_after_s`.

        Stamps are in microseconds of the primary's clock. The newest stamp plus the time since it
        was noticed estimates that clock, so this node's wall clock is not used.
        """
        last_us = self._ordering.last_us
        if last_us != self._stamp[0]:
            self._stamp = last_us, now
        passed_s = now - self._stamp[1]
        old_us = last_us + int((passed_s - self._config.cold_after_s) * 1e6)
        position = self._ordering.find_time(max(old_us, 0))
        return self._ordering.tail if position is None else self._ordering.tail_before(position)

    def _has_too_many_bytes(self) -> bool:
        most = self._config.cold_local_bytes_max
        return bool(most) and most < sum(s.bytes - s.cold_bytes for s in self._shards.values())

    def _run_of(self, shard: Shard, tail: SeqNum) -> LocalBatches | None:
        """Return consecutive batches below `tail` on this node's disk; None: too few bytes."""
        end = min(shard.ordered_below(tail), shard.ordered)
        wanted = self._config.cold_object_bytes
        at = self._unfit.get(shard.id, 0)
        while (run := shard.local_run(at, end, wanted)) is not None:
            # A run directly before a hole or a cold batch never becomes longer.
            if run.bounded or sum(place.length for _, place in run.batches) >= wanted:
                return run
            at = run.end
        return None

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Take a batch for the object; a damaged batch is left to scrub and repair."""
        gathering = self._gathering
        if gathering is None or token not in gathering.awaited:
            return []
        gathering.awaited.remove(token)
        first, place = gathering.run.batches[len(gathering.payloads)]
        batch, damage = parse_batch(place, payload)
        if batch is None or damage is not None or batch.header.first != first:
            # If the batch was not trimmed meanwhile, it stays on this disk until it is repaired.
            if gathering.shard.location_of(first) == place:
                self._unfit[gathering.shard.id] = first + 1
            self._gathering = None
            return []
        assert payload is not None, "it was parsed"
        gathering.payloads.append(payload)
        return []

    def _write(self, gathering: _Gathering) -> list[Effect]:
        ordering, batches = self._ordering, []
        shard = gathering.shard
        for (first, _), payload in zip(gathering.run.batches, gathering.payloads, strict=True):
            seqnum = shard.seqnum_of(first)
            position, stamp = ordering.position_of(seqnum), ordering.ordered_us(seqnum)
            batches.append(ColdBatch(payload, seqnum, stamp, position))
        gathering.is_writing = True
        gathering.payloads = []
        number, self._next_number = self._next_number, self._next_number + 1
        return [AskCold(WriteObject(number, shard.id, batches))]

    def _on_written(self, answer: ObjectWritten, now: Instant) -> list[Effect]:
        gathering, self._gathering = self._gathering, None
        if gathering is None:
            return []
        if answer.made is not None:
            return self._note(answer.made)
        if answer.unfit:
            self._unfit[gathering.shard.id] = gathering.run.end
        else:
            self._move_at = self._retry_at(now)
        return []

    def _note(self, made: ColdObject) -> list[Effect]:
        token = self._token()
        self._notes[token] = made
        return [Persist(FrameKind.COLD, encode_cold_object(made), token)]

    # --- trimmed objects

    def _check(self, now: Instant) -> list[Effect]:
        """Look for objects whose witness is trimmed; read the tags of one of them at a time."""
        if self._is_asking:
            return []
        if self._to_read is not None:
            source, self._to_read = self._to_read, None
            self._is_asking = True
            return [AskCold(ReadColdTags(source))]
        effects: list[Effect] = []
        for _ in range(min(_WITNESSES_MAX, len(self._to_check))):
            made = self._kept.objects.get(self._to_check.pop())
            if made is None:
                continue
            shard = self._shard(made.shard)
            if shard is not None and self._is_alive(made):
                continue
            if shard is None or not shard.cold_runs(made):
                effects.append(AskCold(DeleteObject(made)))  # a crash interrupted its deletion
                continue
            self._to_read = made
            break
        self._check_at = Instant(now + _CHECK_REST_S)
        return effects

    def _is_alive(self, made: ColdObject) -> bool:
        if not made.witness_tags:
            return False
        counts = bytes([len(made.witness_tags) // HASH_BYTES])
        return not self._ordering.floors.dead(made.witness, counts, made.witness_tags).any()

    def _on_tags(self, answer: ColdTagsRead, now: Instant) -> list[Effect]:
        self._is_asking = False
        made = self._kept.objects.get(answer.number)
        if made is None or (shard := self._shard(made.shard)) is None:
            return []
        if answer.tags is None:
            self._to_check.insert(0, answer.number)
            self._check_at = self._retry_at(now)
            return []
        witness = _newest_live(answer.tags, self._ordering)
        if witness is not None:
            seqnum, tags = witness
            self._kept.objects[made.number] = msgspec.structs.replace(
                made, witness=seqnum, witness_tags=tags
            )
            return []
        effects: list[Effect] = []
        token = 0
        for first, end in shard.cold_runs(made):
            shard.discard_all(first, end)
            token = self._token()
            gone = GoneRecords(made.shard, Epoch(0), first, end, repaired=False)
            effects.append(Persist(FrameKind.DISCARDED, encode_gone(gone), token))
        if not effects:
            return [AskCold(DeleteObject(made))]
        self._drops[token] = made
        return effects

    def _on_deleted(self, answer: ObjectDeleted, now: Instant) -> list[Effect]:
        if answer.done:
            self.deleted += self._kept.objects.pop(answer.number, None) is not None
        elif answer.number in self._kept.objects:
            self._to_check.insert(0, answer.number)
            self._check_at = self._retry_at(now)
        else:
            self._is_listed = False  # no note names the object, so the next list finds it
            self._check_at = self._retry_at(now)
        return []

    # --- answers

    def on_persisted(self, token: int) -> list[Effect]:
        """Continue with an object when its note, or the note that its last records are discarded,
        is durable.
        """
        if (made := self._notes.pop(token, None)) is not None:
            moved = self._kept.note(made, self._shard(made.shard))
            self._to_check.append(made.number)  # floors may have risen meanwhile
            self.moved_bytes += sum(before.length for before, _ in moved)
            self._moved += moved
            return [Discard(before, elsewhere=True) for before, _ in moved]
        if (made := self._drops.pop(token, None)) is not None:
            return [AskCold(DeleteObject(made))]
        return []

    def pop_moved(self) -> list[tuple[Location, Location]]:
        """Return the batches that moved since the last call, as pairs of former and new place."""
        moved, self._moved = self._moved, []
        return moved

    def on_answer(self, answer: ColdAnswer, now: Instant) -> list[Effect]:
        """Handle an answer of the cold store; `BatchReads` handles batches that were read."""
        match answer:
            case ObjectsListed():
                return self._on_list(answer, now)
            case ObjectWritten():
                return self._on_written(answer, now)
            case ColdTagsRead():
                return self._on_tags(answer, now)
            case ObjectDeleted():
                return self._on_deleted(answer, now)
            case ColdBatchRead():
                raise AssertionError("a batch is read by `BatchReads`")
            case unreachable:
                assert_never(unreachable)

    def status(self) -> dict[str, int]:
        """Return figures for operators; none if no cold storage is used."""
        if not self._is_used:
            return {}
        return {
            "cold_objects": len(self._kept.objects),
            "cold_object_bytes": self._kept.size_bytes,
            "cold_bytes": sum(shard.cold_bytes for shard in self._shards.values()),
            "cold_moved_bytes": self.moved_bytes,
            "cold_deleted_objects": self.deleted,
        }


def _newest_live(columns: ColdTags, ordering: Ordering) -> tuple[SeqNum, bytes] | None:
    """Return seqnum and tags of the last record that is not trimmed; None: all records are
    trimmed.
    """
    seqnums = np.frombuffer(columns.seqnums, np.uint64)
    counts = np.frombuffer(columns.tag_counts, np.uint8).astype(np.int64)
    tags = np.frombuffer(columns.tags, np.uint64)
    alive = np.flatnonzero(~ordering.floors.dead_at(seqnums, counts, tags))
    if not len(alive):
        return None
    index = int(alive[-1])
    end = int(counts[: index + 1].sum())
    return int(seqnums[index]), tags[end - int(counts[index]) : end].tobytes()
