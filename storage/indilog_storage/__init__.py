"""The storage tier: replicas of shards, which keep records, say how far they have them, and tell
which seqnums they got (ARCHITECTURE 7 to 9, Scalog 3, thesis 4.1).

`StorageNode` is the role.
"""

from __future__ import annotations

from indilog_storage.node import StorageNode

__all__ = ["StorageNode"]
