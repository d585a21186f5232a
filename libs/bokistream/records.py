"""The records of BokiStream: the records of streams, cursors, heartbeats, and the catalog.

Each record of a stream names the record that is to precede its batch in the stream's sub-stream.
The batch has effect only if the named record directly precedes it (docs/decisions/0079). So the
order of the log decides which of several appends takes effect. `bokistream.chain` makes and checks
batches; `indilog.sdk.record_format` defines the frame.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from bokistream.errors import StreamSettingsError, StreamVersionError
from indilog.sdk import RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 1
FORMAT: Final = RecordFormat(b"\xb0R", VERSION, of="BokiStream", error=StreamVersionError)
NAME_BYTES_MAX: Final = 128
"""Largest size of the name of a stream or a reader in UTF-8, in bytes."""
TXID_MAX: Final = 2**63 - 1
SECONDS_MAX: Final = 3_660.0 * 86_400
"""Largest age or grace period, in seconds (ten years)."""

DATA: Final = 0
CLAIM: Final = 1
SEAL: Final = 2

CATALOG_TAG: Final = "streams"
CATALOG_CHECKPOINTS_TAG: Final = "streams:checkpoints"

_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_SeqNumOrNone = Annotated[SeqNum, msgspec.Meta(ge=-1)]
"""A seqnum; -1: there is none."""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_BYTES_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]


class StreamEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record of a stream, and the state of the stream before it.

    Attributes:
        kind: `DATA`; `CLAIM`: a new writer takes the stream over; `SEAL`: the stream ends.
        index: place in its batch, from 0. The records of a batch have consecutive seqnums.
        after: seqnum of the record that must directly precede the batch in the sub-stream; -1: no
            record may precede it.
        previous: seqnum of the last data record before the batch; -1: there is none.
        token: fencing token of the writer: the seqnum of its claim; -1: there is no writer, or
            this record is a claim.
        txid: transaction id of this record; for `CLAIM` and `SEAL`, that of the last data record.
        offset: number of data records before this one.
        size_bytes: bytes of data before this record.
        batch: random number that identifies the batch before its seqnum is known.
        data: bytes of the application.
    """

    kind: Annotated[int, msgspec.Meta(ge=DATA, le=SEAL)]
    index: _Count
    after: _SeqNumOrNone
    previous: _SeqNumOrNone
    token: _SeqNumOrNone
    txid: Annotated[int, msgspec.Meta(ge=0, le=TXID_MAX)]
    offset: _Count
    size_bytes: _Count
    batch: _Count
    data: bytes = b""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The position of a named reader: it has processed all records up to seqnum `done`."""

    done: _SeqNum


class WriterHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """The writer with this fencing token is running."""

    token: _SeqNum


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    """Create a stream, unless there is one with this name."""

    name: _Name
    age_s: _Seconds | None
    size_bytes: _Count | None
    grace_s: _Seconds


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """Replace the retention and the grace period of a stream."""

    name: _Name
    created: _SeqNum
    age_s: _Seconds | None
    size_bytes: _Count | None
    grace_s: _Seconds


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag="truncate"):
    """Truncate a stream below seqnum `start`.

    `anchor`: first seqnum of a batch that has effect. If the records below `anchor` are trimmed,
    all data records from `start` on that have effect remain readable.
    """

    name: _Name
    created: _SeqNum
    start: _SeqNum
    anchor: _SeqNum


class AddReader(msgspec.Struct, frozen=True, array_like=True, tag="add reader"):
    """List the name of a reader that keeps its position."""

    name: _Name
    created: _SeqNum
    reader: _Name


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Remove a stream from the catalog."""

    name: _Name
    created: _SeqNum


Command: TypeAlias = Create | Configure | Truncate | AddReader | Delete

_decode_entry = msgspec.msgpack.Decoder(StreamEntry).decode
_decode_cursor = msgspec.msgpack.Decoder(Cursor).decode
_decode_command = msgspec.msgpack.Decoder(Command).decode


def decode_entry(data: bytes) -> StreamEntry | None:
    """Return the content of a stream's record; None if BokiStream did not write it.

    Raises:
        StreamVersionError: another version wrote the record.
    """
    return FORMAT.decoded(data, _decode_entry)


def decode_cursor(data: bytes) -> Cursor | None:
    """Return the position of a reader; None and errors as in `decode_entry`."""
    return FORMAT.decoded(data, _decode_cursor)


def decode_command(data: bytes) -> Command | None:
    """Return a command of the catalog; None and errors as in `decode_entry`."""
    return FORMAT.decoded(data, _decode_command)


def records_tag(created: SeqNum) -> str:
    """Return the tag of a stream's records. `created` is the seqnum of the stream's creation, so a
    later stream of the same name has another sub-stream.
    """
    return f"stream:{created}"


def heartbeats_tag(created: SeqNum) -> str:
    """Return the tag of the heartbeats of a stream's writers."""
    return f"stream:{created}:heartbeats"


def cursor_tag(created: SeqNum, reader: str) -> str:
    """Return the tag of the positions of a named reader."""
    return f"stream:{created}:cursor:{reader}"


def checked_name(what: str, name: object) -> str:
    """Return the name of a stream or reader; `what` begins the error message.

    Raises:
        StreamSettingsError: the name is not text, is empty or is too long.
    """
    if not isinstance(name, str) or not can_be_in_tag(name, NAME_BYTES_MAX):
        raise StreamSettingsError(
            f"{what} must be 1 to {NAME_BYTES_MAX} bytes of text, not {name!r:.40}."
        )
    return name


def checked_txid(txid: object) -> int:
    """Return a transaction id.

    Raises:
        StreamSettingsError: it is not an integer from 0 to 2**63 - 1.
    """
    if type(txid) is not int or not 0 <= txid <= TXID_MAX:
        raise StreamSettingsError(f"txid must be 0 to 2**63 - 1, not {txid!r:.40}.")
    return txid
