"""The storage tier (ARCHITECTURE 7 to 9, Scalog 3, thesis 4.1): replicas of shards store records.

Each replica reports its stored prefixes to the primary. The first replica of a shard sends the tags
and seqnums of ordered records to the index tier and to the engines.

`StorageNode` is the role. `indilog.runtime` runs it; `indilog_pipeline` reads its journal.
"""

from __future__ import annotations

from indilog_storage.node import StorageNode

__all__ = ["StorageNode"]
