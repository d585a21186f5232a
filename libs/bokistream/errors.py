"""The errors of streams, in addition to those of the log."""

from __future__ import annotations

from typing import ClassVar

from indilog import IndilogError


class StreamError(IndilogError):
    """Base of the errors of BokiStream."""


class StreamSettingsError(StreamError):
    """An argument is invalid; nothing was done."""


class StreamExistsError(StreamError):
    """A stream with this name exists already; nothing was done."""


class StreamNotFoundError(StreamError):
    """There is no stream with this name; nothing was done."""


class StreamVersionError(StreamError):
    """Another version of BokiStream wrote a record, which this program does not read."""


class FencedError(StreamError):
    """Another writer owns the stream, so the record was not appended and never will be.

    Attributes:
        token: the fencing token of the owner; -1: the stream has no writer.
    """

    def __init__(self, name: str, token: int) -> None:
        owner = f"the writer with fencing token {token}" if token >= 0 else "no writer"
        super().__init__(
            f"Stream {name!r} is owned by {owner}, so nothing was appended; open a new writer to "
            "take the stream over."
        )
        self.token = token


class StreamSealedError(StreamError):
    """The stream has ended, so the record was not appended and never will be."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Stream {name!r} was sealed; nothing was appended.")


class MatchFailedError(StreamError):
    """The last record is not the one that `match_seqnum` names; nothing was appended.

    Attributes:
        last_seqnum: seqnum of the last record of the stream; -1: it has none.
    """

    def __init__(self, name: str, match_seqnum: int, last_seqnum: int) -> None:
        super().__init__(
            f"The last record of stream {name!r} has seqnum {last_seqnum}, not {match_seqnum}; "
            "nothing was appended."
        )
        self.last_seqnum = last_seqnum


class TransactionOrderError(StreamError):
    """The transaction id is smaller than that of the last record; nothing was appended.

    Attributes:
        last_txid: transaction id of the last record.
    """

    def __init__(self, name: str, txid: int, last_txid: int) -> None:
        super().__init__(
            f"Transaction id {txid} is smaller than {last_txid}, that of the last record of "
            f"stream {name!r}; nothing was appended."
        )
        self.last_txid = last_txid


class AppendContendedError(StreamError):
    """Other appends to the stream came first each time; nothing was appended."""

    retryable: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Other programs append to stream {name!r} all the time, so nothing was appended; try "
            "again later, or let one writer append."
        )


class StreamTruncatedError(StreamError):
    """Records that the reader has not read were truncated.

    Attributes:
        first_seqnum: the first seqnum that can still be read.
    """

    def __init__(self, name: str, first_seqnum: int) -> None:
        super().__init__(
            f"Stream {name!r} was truncated below seqnum {first_seqnum}; read from there."
        )
        self.first_seqnum = first_seqnum


class StreamTrimmedError(StreamError):
    """Records of the stream were trimmed with its whole log, so its state is unknown."""

    def __init__(self, name: str, first_seqnum: int) -> None:
        super().__init__(
            f"The log of stream {name!r} was trimmed as a whole below seqnum {first_seqnum} (by "
            "retention, or trim() without a tag), so the stream's state is unknown. "
            "Keep streams in a log that is not trimmed; a stream has its own retention."
        )
        self.first_seqnum = first_seqnum


class ReaderIdleError(StreamError):
    """A reader got no record for `idle_s` seconds, although the stream has one or its writer should
    have written a heartbeat. Read on to retry.

    Attributes:
        seqnum: a record that the stream has and the reader did not get; None: the stream has no
            further record, but its writer writes no heartbeats any more.
    """

    def __init__(self, message: str, seqnum: int | None = None) -> None:
        super().__init__(message)
        self.seqnum = seqnum
