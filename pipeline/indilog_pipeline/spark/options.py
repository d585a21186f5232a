"""The options of `spark.read.format("indilog")`, checked (docs/SPARK.md, "Options").

Spark passes options as text. Each error message is one sentence that names the option. `source`
calls `read_options`; all reads get the checked `ReadOptions`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from indilog.base.errors import ConfigError
from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import check_log_name

MIB: Final = 1024 * 1024
PARTITION_BYTES: Final = 64 * MIB
PARTITION_BYTES_MIN: Final = MIB
BATCH_ROWS: Final = 65_536
BATCH_ROWS_MIN: Final = 8_192
BATCH_ROWS_MAX: Final = 1_048_576
_ValueT = TypeVar("_ValueT")
KNOWN: Final = frozenset(
    {
        "url", "path", "token", "ca", "log", "tag", "tag_int", "seqnum_start", "seqnum_end",
        "ordered_start", "ordered_end", "on_loss", "rows", "partition_bytes", "batch_rows",
        "batch_records_max", "batch_bytes_max", "start",
    }
)  # fmt: skip


class Access(msgspec.Struct, frozen=True):
    """The address of a platform, and the credentials for it.

    Attributes:
        url: URL of its gateway.
        token: token of the platform; empty: the reader searches for it on its machine.
        ca: file with the certificates that `https://` trusts; empty: as `indilog.connect`.
    """

    url: str
    token: str = ""
    ca: str = ""

    def __repr__(self) -> str:
        return f"Access({self.url!r})"  # without the token


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a read: a half-open range of seqnums, a half-open range of times, and logs.

    Attributes:
        start, end: seqnums in [start, end).
        ordered_start_us, ordered_end_us: records ordered in [start, end), microseconds since 1970.
        logs: names of the logs; None: all logs.
    """

    start: SeqNum = 0
    end: SeqNum = MAX_SEQNUM
    ordered_start_us: int | None = None
    ordered_end_us: int | None = None
    logs: frozenset[str] | None = None


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of a read.

    Attributes:
        access: the platform to read through; None: read `path`.
        path: data directory to read; empty: read through `access`.
        tag: only records with this tag; None: any tag.
        bounds: seqnums, times and logs to read.
        skips_gaps: whether to skip trimmed, lost and corrupt records instead of failing.
        shows_gaps: whether to return these gaps as rows, instead of the records.
        partition_bytes: target size of a partition, in bytes.
        batch_rows: largest number of rows in an Arrow batch.
        batch_records_max: largest number of records in a micro-batch of a stream; None: no limit.
        batch_bytes_max: largest number of data bytes in a micro-batch, which has at least one
            record; None: no limit.
        from_tail: whether a new stream starts at the end of the log.
    """

    access: Access | None = None
    path: str = ""
    tag: UserTag | None = None
    bounds: Bounds = Bounds()
    skips_gaps: bool = False
    shows_gaps: bool = False
    partition_bytes: int = PARTITION_BYTES
    batch_rows: int = BATCH_ROWS
    batch_records_max: int | None = None
    batch_bytes_max: int | None = None
    from_tail: bool = False


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Return checked options of a read.

    Raises:
        ConfigError: an option is unknown, is out of range, or contradicts another option.
    """
    for name in given:
        if name.lower() not in KNOWN:
            raise ConfigError(f"There is no option {name}; the options are {_listed(KNOWN)}.")
    url, path = given.get("url", ""), given.get("path", "")
    if bool(url) == bool(path):
        raise ConfigError(
            "Give option url (a platform's gateway) or option path (a data directory), and not "
            "both."
        )
    if "tag" in given and "tag_int" in given:
        raise ConfigError("Give option tag (text) or tag_int (an integer tag), not both.")
    return ReadOptions(
        access=Access(url, given.get("token", ""), given.get("ca", "")) if url else None,
        path=path,
        tag=_value(given, "tag_int", _integer(1, 2**64 - 1)) or _value(given, "tag", _text_tag),
        bounds=_bounds(given),
        skips_gaps=_choice(given, "on_loss", "error", "skip"),
        shows_gaps=_choice(given, "rows", "records", "gaps"),
        partition_bytes=_value(given, "partition_bytes", _integer(PARTITION_BYTES_MIN, 2**40))
        or PARTITION_BYTES,
        batch_rows=_value(given, "batch_rows", _integer(BATCH_ROWS_MIN, BATCH_ROWS_MAX))
        or BATCH_ROWS,
        batch_records_max=_value(given, "batch_records_max", _integer(1, 2**40)),
        batch_bytes_max=_value(given, "batch_bytes_max", _integer(1, 2**50)),
        from_tail=_choice(given, "start", "first", "tail"),
    )


def _bounds(given: Mapping[str, str]) -> Bounds:
    log = _value(given, "log", check_log_name)
    start = _value(given, "seqnum_start", _integer(0, MAX_SEQNUM))
    end = _value(given, "seqnum_end", _integer(0, MAX_SEQNUM))
    return Bounds(
        start=start or 0,
        end=MAX_SEQNUM if end is None else end,
        ordered_start_us=_value(given, "ordered_start", _time_us),
        ordered_end_us=_value(given, "ordered_end", _time_us),
        logs=None if log is None else frozenset({log}),
    )


def _value(
    given: Mapping[str, str], name: str, converted: Callable[[str], _ValueT]
) -> _ValueT | None:
    """Return the converted value of an option; None: the option is not given."""
    if name not in given:
        return None
    try:
        return converted(given[name])
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"Option {name} is {error}, not {given[name]!r}.") from None


def integer_option(given: Mapping[str, str], name: str, smallest: int, largest: int) -> int | None:
    """Return an option that is an integer; None: the option is not given.

    Raises:
        ConfigError: the option is no integer, or out of range.
    """
    return _value(given, name, _integer(smallest, largest))


def _integer(smallest: int, largest: int) -> Callable[[str], int]:
    def converted(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value <= largest:
            raise ValueError(f"an integer from {smallest:,} to {largest:,}")
        return value

    return converted


def _text_tag(text: str) -> str:
    if not text:
        raise ValueError("the text of a tag")
    return text


def _time_us(text: str) -> int:
    """Return a time as microseconds since 1970: a number of seconds, or ISO 8601 with a zone."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = _iso_seconds(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("a number of seconds since 1970, or a time like 2026-01-31T08:00:00Z")
    return round(seconds * 1e6)


def _iso_seconds(text: str) -> float:
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return time.timestamp() if time.tzinfo is not None else math.nan


def _choice(given: Mapping[str, str], name: str, default: str, other: str) -> bool:
    """Return whether an option has its `other` value."""
    value = given.get(name, default).lower()
    if value not in (default, other):
        raise ConfigError(f"Option {name} is {default} or {other}, not {given[name]!r}.")
    return value == other


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
