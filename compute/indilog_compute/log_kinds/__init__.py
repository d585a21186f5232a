"""Kinds of log on a compute node: the catalog of created logs, and logs that are not `shared`."""

from __future__ import annotations

from indilog_compute.log_kinds.catalog import CreatedLog
from indilog_compute.log_kinds.kinds import LogKinds, OpenLogs, OtherLogs

__all__ = ["CreatedLog", "LogKinds", "OpenLogs", "OtherLogs"]
