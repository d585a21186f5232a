"""Identifiers of nodes, shards and records, and the hashing of tags.

Identifiers are plain integers and strings at run time, so they need no extra space in columns and
messages. A user's tag (text or integer) is hashed to 64 bits together with the name of its log. So
no log shows another log's records (PITFALLS 6). A record also carries the tag's text, which readers
check. So after a hash collision a read continues its search and never returns a wrong record. All
packages use this module; of IndiLog it uses only `indilog.base.errors`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, NewType, TypeAlias

from xxhash import xxh3_64_intdigest

from indilog.base.errors import InvalidTagError

NodeId = NewType("NodeId", str)
"""Name of one role instance, e.g. `storage-0`; unique in a cluster, the same over restarts."""

ShardId = NewType("ShardId", int)
"""Number of a shard, 0 to 65,535; the Suffix, a part of the local index, stores it in two bytes
(thesis 5.1.1).
"""

SeqNum: TypeAlias = int
"""Position of a record in the total order of a logspace; dense from 0."""

LocalId: TypeAlias = int
"""Position of a record in its shard; dense from 0."""

MetalogPosition: TypeAlias = int
"""A count of applied metalog entries: the logical clock of reads, sessions and indexes."""

Epoch = NewType("Epoch", int)
"""Number of an incarnation of a writer or process; grows with every start."""

ViewNumber = NewType("ViewNumber", int)

Instant = NewType("Instant", float)
"""Seconds since 1970 on a clock that never goes back within a process."""

TagHash: TypeAlias = int
"""Hash of a log and a tag, 64 bits; 0 is the empty tag, which every record of the logspace has."""

UserTag: TypeAlias = str | int
"""A tag as a program writes it: text of at most `TAG_BYTES_MAX` bytes, or 1 to 2**64 - 1."""

MAX_SEQNUM: Final = 2**63 - 1
"""The greatest seqnum; as a bound it means the end of the log."""
EMPTY_TAG: Final[TagHash] = 0
HASH_BYTES: Final = 8
"""Bytes of a `TagHash` in batches and index data."""
TAG_BYTES_MAX: Final = 256
"""Largest size of a text tag in UTF-8, in bytes."""
LOG_NAME_BYTES_MAX: Final = 128

_TAG_KEY: Final = 0x1D110C
_SEPARATOR: Final = b"\x1f"
_TEXT, _INTEGER = "s", "i"
_TWO_HASHES: Final = struct.Struct("<2Q")


def _folded(log: str, name: str) -> TagHash:
    """Hash one tag of one log."""
    return _hash_of_names(f"{log}\x1f{name}".encode())


def _hash_of_names(names: bytes) -> TagHash:
    """Hash the names of a record with one tag; never 0, which is the empty tag."""
    return xxh3_64_intdigest(names, _TAG_KEY) or 1


def is_common_tag(tag: object) -> bool:
    """Return whether a tag is valid ASCII text. The test is cheap. If it fails, the tag may still
    be valid, for example as an integer.
    """
    return (
        type(tag) is str and tag.isascii() and 0 < len(tag) <= TAG_BYTES_MAX and "\x1f" not in tag
    )


def check_tag(tag: UserTag) -> None:
    """Raise for an invalid tag.

    Raises:
        InvalidTagError: the tag is empty, zero, too long or of a wrong type.
    """
    if not is_common_tag(tag):
        _spelled(tag)


def _spelled(tag: UserTag) -> str:
    """Return a tag's text form, which differs for the text `7` and the integer 7."""
    if type(tag) is int:
        if 0 < tag < 2**64:
            return f"{_INTEGER}{tag}"
    elif is_common_tag(tag):
        return f"{_TEXT}{tag}"
    if isinstance(tag, bool) or not isinstance(tag, str | int):
        raise InvalidTagError(
            f"A tag must be text or an integer, not {type(tag).__name__}: {tag!r}."
        )
    if isinstance(tag, int):
        if not 0 < tag < 2**64:
            raise InvalidTagError(f"An integer tag must be between 1 and 2**64-1, not {tag}.")
        return f"{_INTEGER}{tag}"
    return _TEXT + _checked_text(tag)


def _checked_text(tag: str) -> str:
    """Return a text tag.

    Raises:
        InvalidTagError: the tag is empty or too long, contains U+001F, or has no UTF-8 form.
    """
    if not tag:
        raise InvalidTagError("A tag must not be empty; omit it, or give a text.")
    if "\x1f" in tag:
        raise InvalidTagError("A tag must not contain the control character U+001F.")
    try:
        size = len(tag.encode())
    except UnicodeEncodeError as error:
        raise InvalidTagError("A tag must be text that can be encoded as UTF-8.") from error
    if size > TAG_BYTES_MAX:
        raise InvalidTagError(f"A tag may have at most {TAG_BYTES_MAX} bytes; this one has {size}.")
    return tag


def can_be_in_tag(text: object, bytes_max: int) -> bool:
    """Return whether a tag can contain `text`: text of 1 to `bytes_max` bytes without U+001F."""
    return isinstance(text, str) and "\x1f" not in text and 0 < _utf8_bytes(text) <= bytes_max


def _utf8_bytes(text: str) -> int:
    """Return the length of `text` in UTF-8, in bytes; 0 if it has no UTF-8 form (lone
    surrogates).
    """
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
            f"A log's name must be 1 to {LOG_NAME_BYTES_MAX} bytes of text without U+001F, not "
            f"{log!r}."
        )
    return _folded(log, "")


@lru_cache(maxsize=16384, typed=True)
def tag_hash(log: str, tag: UserTag) -> TagHash:
    """Return the hash of `tag` of `log`, 64 bits.

    Raises:
        InvalidTagError: the tag is empty, zero, too long or of a wrong type.
    """
    return _folded(log, _spelled(tag))


class TagColumns(NamedTuple):
    """The tag columns of a record, in the format of record batches."""

    tags: bytes
    """The hashes of the record's log and of its tags, in this order: u64 each, little-endian."""
    names: bytes
    """The texts of the record's log and tags (`decode_names`)."""


_COLUMNS_BYTES_MAX: Final = 8 * 1024 * 1024
_COLUMNS_OVERHEAD_BYTES: Final = 512
_TAG_BYTES: Final = 128
"""Memory for a tag: its hash, the header of its text, its place in a tuple."""
_CHAR_BYTES_MAX: Final = 4
_TAG_TYPES: Final = frozenset({str, int})


class _ColumnsCache:
    """A cache of tag columns, bounded in bytes.

    Every append looks up this cache, so a hit must cost no more than a lookup in a dictionary. The
    cache consists of two dictionaries, `young` and `_old`. A new entry goes to `young`. An entry of
    `_old` that is used again also goes to `young`. When `young` has half of `bytes_max`, it
    replaces `_old`.
    """

    __slots__ = ("_bytes", "_bytes_max", "_old", "young")

    def __init__(self, bytes_max: int) -> None:
        self._bytes = 0
        self._bytes_max = bytes_max
        self.young: dict[tuple[object, ...], TagColumns] = {}
        """Columns by log and tags. If a tag is not text, the key also has the types of the tags."""
        self._old: dict[tuple[object, ...], TagColumns] = {}

    def columns(self, log: str, tags: tuple[UserTag, ...]) -> TagColumns:
        """Return the columns, from the cache or computed.

        Raises:
            InvalidTagError: a tag is empty, zero, too long or of a wrong type.
        """
        types = tuple(map(type, tags))
        if not _TAG_TYPES.issuperset(types):
            return _columns_of(log, tags)
        # A key with integers also has their types. `tag_columns` looks up a key without types, and
        # would otherwise find the integer 1 for True, and the integer 7 for 7.0.
        key = (log, tags, types) if int in types else (log, tags)
        columns = self.young.get(key)
        if columns is None:
            columns = self._old.get(key) or _columns_of(log, tags)
            self._put(key, columns, len(tags))
        return columns

    def _put(self, key: tuple[object, ...], columns: TagColumns, tags: int) -> None:
        # The key also has the names, as text of up to four bytes a character.
        size_bytes = _COLUMNS_OVERHEAD_BYTES + (1 + _CHAR_BYTES_MAX) * len(columns.names)
        size_bytes += _TAG_BYTES * (1 + tags)
        if 2 * (self._bytes + size_bytes) > self._bytes_max:
            self._old, self.young = self.young, {}
            self._bytes = 0
        self.young[key] = columns
        self._bytes += size_bytes

    def __len__(self) -> int:
        return len(self.young) + len(self._old)


_columns = _ColumnsCache(_COLUMNS_BYTES_MAX)


def tag_columns(log: str, tags: tuple[UserTag, ...]) -> TagColumns:
    """Return the tag columns of a record of `log` with `tags`.

    Raises:
        InvalidTagError: a tag is empty, zero, too long or of a wrong type.
    """
    try:  # the common hit, without a call: a key without types has only text tags
        columns = _columns.young.get((log, tags))
    except TypeError:  # an unhashable value, which is not a tag
        columns = None
    return columns if columns is not None else _columns.columns(log, tags)


def _columns_of(log: str, tags: tuple[UserTag, ...]) -> TagColumns:
    # Each append with a new tag calls this function, mostly with a single tag. The hash of a single
    # tag is the hash of the names.
    if len(tags) == 1:
        names = f"{log}\x1f{_spelled(tags[0])}".encode()
        packed = _TWO_HASHES.pack(log_tag(log), _hash_of_names(names))
        return tuple.__new__(TagColumns, (packed, names))
    spelled = dict.fromkeys(map(_spelled, tags))
    names = "\x1f".join((log, *spelled)).encode()
    hashes = [_folded(log, name) for name in spelled]
    # `tuple.__new__` does the same as `TagColumns(...)`, without a call of a Python function.
    return tuple.__new__(TagColumns, (pack_tags(log_tag(log), *hashes), names))


def pack_tags(*tags: TagHash) -> bytes:
    """Return hashes in the format of record batches: u64 each, little-endian."""
    return struct.pack(f"<{len(tags)}Q", *tags)


def unpack_tags(packed: bytes) -> array[TagHash]:
    """Return the hashes that `pack_tags` packed."""
    return array("Q", packed)


def decode_names(names: bytes) -> tuple[str, tuple[UserTag, ...]]:
    """Return the log and the tags in a record's column of names."""
    log, *spelled = names.decode().split("\x1f")
    return log, tuple(int(n[1:]) if n[0] == _INTEGER else n[1:] for n in spelled)


def names_have(names: bytes, tag: TagHash) -> bool:
    """Return whether a record with `names` has a tag with this hash. The tag of its log counts,
    too.
    """
    log, *spelled = names.decode().split("\x1f")
    return tag == log_tag(log) or any(_folded(log, name) == tag for name in spelled)


def tag_hashes_in(names: bytes) -> list[TagHash]:
    """Return the hashes of the tags in `names`, without that of the log."""
    log, *spelled = names.decode().split("\x1f")
    return [_folded(log, name) for name in spelled]


def names_match(names: bytes, log: str, tag: UserTag | None) -> bool:
    """Return whether a record with `names` is in `log` and has `tag` (None: any)."""
    parts = names.split(_SEPARATOR)
    if parts[0] != log.encode():
        return False
    return tag is None or _spelled(tag).encode() in parts[1:]


def majority(members: Sequence[object] | int) -> int:
    """Return how many of `members` are a majority."""
    count = members if isinstance(members, int) else len(members)
    return count // 2 + 1
