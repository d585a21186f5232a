"""Messages, frames and records as one line of text each, the same in every run.

A field is shown as its name and value if the value differs from its default. Bytes are decoded
where they hold records, tags or names; otherwise their length is shown.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import assert_never

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import EMPTY_TAG, TagHash, decode_names
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import (
    Entry,
    Floor,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
    Trim,
    decode_entries,
    decode_entry,
)
from indilog.kernel.records import MAGIC, RecordBatch
from indilog.roles.role import FrameKind
from indilog.wire.messages import (
    AppendBatch,
    Message,
    ShardProgress,
    ShardTags,
    StoredRecord,
)
from indilog_ordering import metalog_state

_REQUESTS_PER_EPOCH = 1 << 32
_UNBOUNDED_MIN = 1 << 62


class Shown:
    """Turns values into text.

    Attributes:
        tags: the names of the tags that a scenario has used, by hash.
        origin: the time at which the scenario began, in seconds since 1970.
    """

    def __init__(self, origin: float) -> None:
        self.tags: dict[TagHash, str] = {EMPTY_TAG: "any"}
        self.origin = origin

    def message(self, message: Message) -> str:
        """Return the kind of a message and its fields."""
        kind = type(message).__name__
        match message:
            case AppendBatch(batch):
                return f"{kind} {self.batch(batch)}"
            case ShardProgress(term, stored, _):
                shards = (
                    f"shard {shard} stored {length} of writer {writer}"
                    for shard, (writer, length) in sorted(stored.items())
                )
                return f"{kind} {', '.join(shards)} term {term}"
            case _:
                return " ".join((kind, *self._fields(message)))

    def frame(self, kind: FrameKind, payload: bytes) -> str:
        """Return the kind of a journal frame and what it holds."""
        return f"{kind.name} {self._content(kind, payload)}"

    def _content(self, kind: FrameKind, payload: bytes) -> str:
        if kind in (FrameKind.RECORDS, FrameKind.REPAIRED):
            return self.batch(payload)
        if kind is FrameKind.METALOG:
            return self.entry(decode_entry(payload))
        if kind is FrameKind.ORDERING:
            return self._list(self.entry(entry) for entry in decode_entries(payload))
        if kind is FrameKind.METALOG_STATE:
            return self._struct(metalog_state.decode_state(payload))
        return f"{len(payload)} bytes"

    def batch(self, buffer: bytes) -> str:
        """Return the place of a record batch in its shard, and its records."""
        try:
            batch = RecordBatch(buffer, partly=True)
        except MalformedFrameError as error:
            return f"{len(buffer)} bytes ({error})"
        header = batch.header
        records = (
            "damaged"
            if index in batch.damaged
            else self.record(batch.names(index), batch.record(index).data)
            for index in range(header.records)
        )
        place = f"shard {header.shard} writer {header.epoch} from {header.first}"
        return f"{place} {self._list(records)}"

    def record(self, names: bytes, data: bytes) -> str:
        """Return the log, the tags and the data of a record."""
        if not names:
            return "tombstone"
        log, tags = decode_names(names)
        return f"{':'.join((log, *map(str, tags)))} {data.decode()!r}"

    def entry(self, entry: Entry) -> str:
        """Return a metalog entry: its position, who proposed it, what it orders or trims."""
        place = f"#{entry.position} of primary {entry.epoch}"
        match entry:
            case NewRecords(counts=counts, time_us=time_us):
                if time_us > self.origin * 1e6:
                    place += f" at {self.seconds(time_us / 1e6)}"
                change = self._list(
                    f"shard {shard} +{count}" for shard, count in sorted(counts.items())
                )
            case NewWriters(writers=writers):
                change = self._list(
                    f"shard {shard} to writer {writer}" for shard, writer in sorted(writers.items())
                )
            case NewReplicas(replicas=replicas):
                change = self._list(
                    f"shard {shard} to {', '.join(nodes)}"
                    for shard, nodes in sorted(replicas.items())
                )
            case NewView(following=view):
                change = f"view {view.number} with {', '.join(view.nodes)}"
            case Trim(number=number, floors=floors):
                change = f"trim {number} {self._list(map(self._floor, floors))}"
            case unreachable:
                assert_never(unreachable)
        return f"{place} {change}"

    def seconds(self, time_s: float) -> str:
        """Return a time as seconds since the scenario began."""
        return f"{time_s - self.origin:.3f} s"

    # --- parts

    def _fields(self, struct: msgspec.Struct) -> Iterator[str]:
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            if field.default is msgspec.NODEFAULT or value != field.default:
                yield f"{field.name} {self._field(field.name, value)}"

    def _field(self, name: str, value: object) -> str:
        match name, value:
            case (("tag" | "log"), int()):
                return self._tag(value)
            case (("time_us" | "ordered_us"), int()):
                return self.seconds(value / 1e6) if value else "0"
            case _, int() if value >= _UNBOUNDED_MIN:
                return "unbounded"
            case "request", int() if value >= _REQUESTS_PER_EPOCH:
                return f"{value // _REQUESTS_PER_EPOCH}.{value % _REQUESTS_PER_EPOCH}"
            case _:
                return self._value(value)

    def _value(self, value: object) -> str:
        if (part := self._part(value)) is not None:
            return part
        match value:
            case enum.Enum():
                return value.name
            case bytes():
                return self.batch(value) if value.startswith(MAGIC) else f"{len(value)} bytes"
            case Mapping():
                return self._list(f"{key}: {self._value(value[key])}" for key in sorted(value))
            case Sequence() if not isinstance(value, str):
                return self._list(map(self._value, value))
            case _:
                return str(value)

    def _part(self, value: object) -> str | None:  # noqa: PLR0911
        """Return what is shown of a part of a message; None: it has no form of its own."""
        match value:
            case NewRecords() | NewWriters() | Trim():
                return self.entry(value)
            case StoredRecord():
                return f"{value.seqnum}: {self.record(value.names, value.data)}"
            case ShardTags():
                return self._shard_tags(value)
            case LostRange(start, end):
                return f"{start} to {end - 1}"
            case Floor():
                return self._floor(value)
            case msgspec.Struct():
                return self._struct(value)
            case _:
                return None

    def _struct(self, struct: msgspec.Struct) -> str:
        return f"({', '.join(self._fields(struct))})"

    def _floor(self, floor: Floor) -> str:
        return f"{self._tag(floor.tag)} below {floor.until}"

    def _shard_tags(self, part: ShardTags) -> str:
        tags = array("Q", part.tags)
        ends = list(accumulate(part.tag_counts))
        records = (
            "+".join(map(self._tag, tags[end - count : end])) or "no tags"
            for count, end in zip(part.tag_counts, ends, strict=True)
        )
        lost = f" lost {self._value(part.lost)}" if part.lost else ""
        return f"shard {part.shard} from seqnum {part.first_seqnum} {self._list(records)}{lost}"

    def _tag(self, tag: TagHash) -> str:
        return self.tags.get(tag, f"tag {tag:016x}")

    def _list(self, parts: Iterable[str]) -> str:
        return f"[{', '.join(parts)}]"
