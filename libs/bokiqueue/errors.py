"""The errors of BokiQueue. All other errors that queues raise are those of the log."""

from __future__ import annotations

from indilog import IndilogError


class QueueError(IndilogError):
    """Base of the errors of BokiQueue."""


class QueueSettingsError(QueueError):
    """A setting is invalid, or differs from the setting with which the queue was created."""


class LeaseLostError(QueueError):
    """The consumer no longer holds the message, so the command had no effect on it.

    If the lease has ended, the message is delivered again, or is a dead letter after its last try.
    The message may also have been acknowledged, requeued or purged before.
    """


class QueueVersionError(QueueError):
    """A record was written by another version of BokiQueue, and this program cannot read it."""


class QueueTrimmedError(QueueError):
    """Records of the queue were lost in a trim of its whole log, so the queue's contents are
    unknown.

    Attributes:
        first_seqnum: the log has no record below this seqnum.
    """

    def __init__(self, name: str, first_seqnum: int) -> None:
        super().__init__(
            f"The log of queue {name!r} was trimmed as a whole below seqnum {first_seqnum} (by "
            "retention, or trim() without a tag), so the queue's contents are unknown. "
            "Keep queues in a log that is not trimmed."
        )
        self.first_seqnum = first_seqnum
