"""The local index of a compute node: small, bounded, and often incomplete (thesis 5.1).

It answers lookups of this node only. A lookup that it cannot answer is a `Miss`, and goes to the
index tier. `local_index` combines its parts; `answers` are the outcomes. `suffix` has the newest
records of the whole log, and `popularity_cache` older seqnums that were read recently. `tag_cache`
has the newest records of the tags in use. `answer_cache` has final answers of the index tier.
"""

from indilog_compute.local_index.answers import Answer, Empty, Found, Matches, Miss, RangeAnswer
from indilog_compute.local_index.local_index import LocalIndex
from indilog_compute.local_index.tag_rows import First

__all__ = ["Answer", "Empty", "First", "Found", "LocalIndex", "Matches", "Miss", "RangeAnswer"]
