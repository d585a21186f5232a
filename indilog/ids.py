"""Identifiers and tags: the names by which everything else speaks of nodes, shards and records.

All are plain integers and strings at run time, so that they cost nothing in columns and messages. A
tag that a person writes (text or integer) becomes 64 bits here, folded with the name of its log, so
that two logs can never see each other's records (PITFALLS 6). The text itself travels with the
record, and readers check it: a collision of the hash costs a retry and never shows a foreign
record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NewType, TypeAlias

from xxhash import xxh3_64_intdigest

from indilog.errors import InvalidTagError

NodeId = NewType("NodeId", str)
"""Name of one role instance, e.g. `storage-0`; unique in a cluster, the same over restarts."""

ShardId = NewType("ShardId", int)
"""0 to 65,535: two bytes in the Suffix (thesis 5.1.1)."""

SeqNum: TypeAlias = int
"""Place in the total order of a logspace; dense from 0."""

LocalId: TypeAlias = int
"""Position in a shard; dense from 0."""

MetalogPosition: TypeAlias = int
"""How many metalog entries are applied: the logical clock of reads, sessions and indexes."""

Epoch = NewType("Epoch", int)
"""Incarnation of one writer or process; grows with every start."""

ViewNumber = NewType("ViewNumber", int)

Instant = NewType("Instant", float)
"""Seconds since 1970 on a clock that never goes back within a process."""

TagHash: TypeAlias = int
"""64 bits; 0 is the empty tag, which every record of the logspace has."""

UserTag: TypeAlias = str | int

MAX_SEQNUM: Final = 2**63 - 1
EMPTY_TAG: Final[TagHash] = 0
TAG_BYTES_MAX: Final = 256
LOG_NAME_BYTES_MAX: Final = 128

_TAG_KEY: Final = 0x1D110C
_SEPARATOR: Final = b"\x1f"
_TEXT, _INTEGER = "s", "i"


def _folded(log: str, name: str) -> TagHash:
    """Hash one tag of one log; never 0, which is the empty tag."""
    return xxh3_64_intdigest(f"{log}\x1f{name}".encode(), _TAG_KEY) or 1


def _spelled(tag: UserTag) -> str:
    """Spell a tag so that the text `7` and the integer 7 stay different."""
    if isinstance(tag, bool) or not isinstance(tag, str | int):
        raise InvalidTagError(f"A tag is text or an integer, not {type(tag).__name__}: {tag!r}.")
    if isinstance(tag, int):
        if not 0 < tag < 2**64:
            raise InvalidTagError(f"An integer tag is between 1 and 2**64-1, not {tag}.")
        return f"{_INTEGER}{tag}"
    if not tag:
        raise InvalidTagError("A tag must not be empty; leave it out to read every record.")
    if "\x1f" in tag:
        raise InvalidTagError("A tag must not contain the control character U+001F.")
    try:
        size = len(tag.encode())
    except UnicodeEncodeError as error:
        raise InvalidTagError("A tag is text that can be written as UTF-8.") from error
    if size > TAG_BYTES_MAX:
        raise InvalidTagError(f"A tag is at most {TAG_BYTES_MAX} bytes, this one is {size}.")
    return _TEXT + tag


def _utf8_bytes(text: str) -> int:
    """How many bytes `text` takes as UTF-8; 0: it cannot be written so (lone surrogates)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


@lru_cache(maxsize=4096)
def log_tag(log: str) -> TagHash:
    """Return the tag that every record of `log` has.

    Raises:
        InvalidTagError: the name is empty, too long or contains U+001F.
    """
    if "\x1f" in log or not 0 < _utf8_bytes(log) <= LOG_NAME_BYTES_MAX:
        raise InvalidTagError(
            f"A log's name is 1 to {LOG_NAME_BYTES_MAX} bytes of text without U+001F, not {log!r}."
        )
    return _folded(log, "")


@lru_cache(maxsize=16384, typed=True)
def tag_hash(log: str, tag: UserTag) -> TagHash:
    """Return the 64 bits that stand for `tag` of `log`.

    Raises:
        InvalidTagError: the tag is empty, zero, too long or of a wrong type.
    """
    return _folded(log, _spelled(tag))


@lru_cache(maxsize=16384)
def tag_columns(log: str, tags: tuple[UserTag, ...]) -> tuple[tuple[TagHash, ...], bytes]:
    """Return what a record of `log` with `tags` carries: its hashes, the log's first, and its
    names.

    Raises:
        InvalidTagError: a tag is empty, zero, too long or of a wrong type.
    """
    spelled = [_spelled(tag) for tag in dict.fromkeys(tags)]
    hashes = (log_tag(log), *(_folded(log, name) for name in spelled))
    return hashes, "\x1f".join([log, *spelled]).encode()


def names_decoded(names: bytes) -> tuple[str, tuple[UserTag, ...]]:
    """Return the log and the tags that a record's names column spells."""
    log, *spelled = names.decode().split("\x1f")
    return log, tuple(int(n[1:]) if n[0] == _INTEGER else n[1:] for n in spelled)


def names_match(names: bytes, log: str, tag: UserTag | None) -> bool:
    """Tell whether a record that carries `names` is in `log` and has `tag` (None: any)."""
    parts = names.split(_SEPARATOR)
    if parts[0] != log.encode():
        return False
    return tag is None or _spelled(tag).encode() in parts[1:]


def majority(members: Sequence[object] | int) -> int:
    """Return how many of `members` are a majority."""
    count = members if isinstance(members, int) else len(members)
    return count // 2 + 1
