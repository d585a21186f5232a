"""Messages about a log's retention policy (`indilog.link.link_messages` has the others)."""

from __future__ import annotations

from indilog.base.ids import MetalogPosition
from indilog.base.retention import Retention
from indilog.link.link_message import LinkStruct


class LogSetRetention(LinkStruct, frozen=True):
    """worker, client → compute node: sets the log's policy; answered by `Done`.

    Lost: the outcome is unknown to the asker (`AppendOutcomeUnknownError`); repeating it is
    harmless.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    age_s: float | None
    size_bytes: int | None


class LogRetention(LinkStruct, frozen=True):
    """worker, client → compute node: asks for the log's policy; answered by `RetentionFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition


class RetentionFound(LinkStruct, frozen=True):
    """compute node → worker, client: the log's policy.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    retention: Retention
