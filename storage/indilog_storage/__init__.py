"""The storage tier (ARCHITECTURE 7 to 9, Scalog 3, thesis 4.1). Replicas of shards store records
and report their stored prefixes to the primary. They send the tags and seqnums of records to the
index.

`StorageNode` is the role.
"""

from __future__ import annotations

from indilog_storage.node import StorageNode

__all__ = ["StorageNode"]
