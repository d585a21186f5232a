"""Kinds of log on a compute node (docs/KINDS.md; decisions 0082 and 0088).

| module | task |
|---|---|
| `catalog`, `catalog_records` | replay the catalog of created and switched logs |
| `kinds` | creates and switches logs, and opens those that are not `shared` |
| `opened_segment` | opens a segment of another kind than `shared` |
| `freeing` | frees trimmed segments of switched logs |
| `segments` | the parts of a switched log, and their seqnums |
| `route`, `segmented_log` | send the calls of one log to its segments |
| `following_log` | a `shared` log that becomes a `SegmentedLog` when a switch begins |
| `routes` | the HTTP routes `/logs` |
"""

from __future__ import annotations

from indilog_compute.log_kinds.catalog_records import CreatedLog
from indilog_compute.log_kinds.kinds import LogKinds
from indilog_compute.log_kinds.opened_segment import OpenLogs, OtherLogs

__all__ = ["CreatedLog", "LogKinds", "OpenLogs", "OtherLogs"]
