"""The local index of a compute node: small, bounded, and often incomplete (thesis 5.1).

It answers lookups of this node only. A lookup that it cannot answer is a `Miss`, and goes to the
index tier. `LocalIndex` combines the parts of the index; `answers` has the outcomes of a lookup.
`suffix` has the shards of the newest records of the whole log. `popularity_cache` has the shards of
older records that were read recently. `tag_cache` has the newest records of the tags in use.
`answer_cache` has final answers of the index tier. `Engine` applies metalog entries and index data;
`indilog_compute.reads` looks up records.
"""

from indilog_compute.local_index.answers import Answer, Empty, Found, Matches, Miss, RangeAnswer
from indilog_compute.local_index.local_index import LocalIndex
from indilog_compute.local_index.tag_rows import First

__all__ = ["Answer", "Empty", "First", "Found", "LocalIndex", "Matches", "Miss", "RangeAnswer"]
