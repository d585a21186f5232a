"""BokiStream: streams with one writer at a time, on a shared log (DistributedLog's design).

Start with `Streams`; `docs/libs/bokistream.md` is the guide. The library awaits only the public
`indilog.Log` interface. Only `bokistream.waiting`, mirrors and the command need an event loop.
Applications and the command `python -m bokistream` use the library.
"""

from bokistream.appender import Appender
from bokistream.catalog import Catalog, StreamInfo
from bokistream.chain import Last, StreamRecord
from bokistream.errors import (
    AppendContendedError,
    FencedError,
    MatchFailedError,
    ReaderIdleError,
    StreamError,
    StreamExistsError,
    StreamNotFoundError,
    StreamSealedError,
    StreamSettingsError,
    StreamTrimmedError,
    StreamTruncatedError,
    StreamVersionError,
    TransactionOrderError,
)
from bokistream.mirror import StreamMirror, StreamMirrorProgress
from bokistream.reader import Reader
from bokistream.status import ReaderStatus, Segment, StreamStatus
from bokistream.streams import Streams
from bokistream.writer import Writer

__all__ = [
    "AppendContendedError",
    "Appender",
    "Catalog",
    "FencedError",
    "Last",
    "MatchFailedError",
    "Reader",
    "ReaderIdleError",
    "ReaderStatus",
    "Segment",
    "StreamError",
    "StreamExistsError",
    "StreamInfo",
    "StreamMirror",
    "StreamMirrorProgress",
    "StreamNotFoundError",
    "StreamRecord",
    "StreamSealedError",
    "StreamSettingsError",
    "StreamStatus",
    "StreamTrimmedError",
    "StreamTruncatedError",
    "StreamVersionError",
    "Streams",
    "TransactionOrderError",
    "Writer",
]
