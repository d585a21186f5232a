"""Link messages about a log's retention policy (`indilog.link.link_messages` has other messages).

`indilog.link.remote` sends the questions, and the compute node's `log_service` answers them.
"""

from __future__ import annotations

from indilog.base.ids import MetalogPosition
from indilog.base.retention import Retention
from indilog.link.link_message import LinkStruct


class LogSetRetention(LinkStruct, frozen=True):
    """worker, client → compute node: set the log's policy; answered by `Done`.

    Lost: the outcome is unknown to the asker (`AppendOutcomeUnknownError`). Setting the policy
    again is harmless.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    age_s: float | None
    size_bytes: int | None


class LogRetention(LinkStruct, frozen=True):
    """worker, client → compute node: the log's policy; answered by `RetentionFound`.

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
