"""The errors of queues, in addition to those of the log."""

from __future__ import annotations

from indilog import IndilogError


class QueueError(IndilogError):
    """Base of the errors of BokiQueue."""


class QueueSettingsError(QueueError):
    """An invalid setting, or one that differs from the setting with which the queue was created."""


class LeaseLostError(QueueError):
    """The lease ended before the message was acknowledged; the message is, or will be, delivered
    again.
    """


class QueueVersionError(QueueError):
    """Another version of BokiQueue wrote a record, which this program does not read."""


class QueueTrimmedError(QueueError):
    """Records of the queue were trimmed with its whole log, so its contents are unknown.

    Attributes:
        first_seqnum: the log has no record below it.
    """

    def __init__(self, name: str, first_seqnum: int) -> None:
        super().__init__(
            f"The log of queue {name!r} was trimmed as a whole below seqnum {first_seqnum} (by "
            "retention, or trim() without a tag), so the queue's contents are unknown. "
            "Keep queues in a log that is not trimmed."
        )
        self.first_seqnum = first_seqnum
