"""The local index of a compute node: small, bounded, and often incomplete (thesis 5.1).

It answers lookups of this node's own tasks only; what it cannot answer is a `Miss`, and the index
tier answers instead. Three parts: `suffix` (the newest records of the whole log),
`popularity_cache` (older seqnums that were read lately), `tag_cache` (the newest records of the
tags in use); `local_index` puts them together, `answers` are the outcomes.
"""

from indilog_compute.local_index.answers import Answer, Empty, Found, Matches, Miss, RangeAnswer
from indilog_compute.local_index.local_index import LocalIndex
from indilog_compute.local_index.tag_rows import First

__all__ = ["Answer", "Empty", "First", "Found", "LocalIndex", "Matches", "Miss", "RangeAnswer"]
