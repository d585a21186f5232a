"""Converts messages of the gRPC interface to values of a log (`*_from`), and values to messages
(`*_to`). `LogService` calls these functions.
"""

from __future__ import annotations

from collections.abc import Iterable

from indilog.base.errors import InvalidTagError
from indilog.base.ids import UserTag
from indilog.base.log import After, Entry, Record
from indilog.base.retention import Retention
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb


def tag_from(tag: pb.Tag) -> UserTag:
    """Return the tag in a message.

    Raises:
        InvalidTagError: the message has neither a text nor a number.
    """
    match tag.WhichOneof("kind"):
        case "text":
            return tag.text
        case "number":
            return tag.number
        case _:
            raise InvalidTagError("A tag has neither text nor a number; set one of them.")


def tags_from(tags: Iterable[pb.Tag]) -> tuple[UserTag, ...]:
    """Return the tags in messages."""
    return tuple(map(tag_from, tags))


def tag_to(tag: UserTag) -> pb.Tag:
    """Return the message of a tag."""
    return pb.Tag(text=tag) if isinstance(tag, str) else pb.Tag(number=tag)


def entries_from(entries: Iterable[pb.Entry]) -> list[Entry]:
    """Return the records to append that messages contain."""
    return [Entry(entry.data, tags_from(entry.tags)) for entry in entries]


def after_from(after: pb.After) -> After:
    """Return the condition of an append that a message contains."""
    return After(tag_from(after.tag), after.seqnum if after.HasField("seqnum") else None)


def record_to(record: Record) -> pb.Record:
    """Return the message of a record."""
    return pb.Record(
        seqnum=record.seqnum,
        data=record.data,
        tags=map(tag_to, record.tags),
        aux=record.aux,
        time=record.time,
        ordered_at=record.ordered_at,
    )


def retention_from(policy: pb.Retention) -> Retention:
    """Return the retention policy in a message."""
    return Retention(
        age_s=policy.age_seconds if policy.HasField("age_seconds") else None,
        size_bytes=policy.size_bytes if policy.HasField("size_bytes") else None,
    )


def retention_to(policy: Retention) -> pb.Retention:
    """Return the message of a retention policy."""
    return pb.Retention(age_seconds=policy.age_s, size_bytes=policy.size_bytes)
