"""What all messages on a link have in common (`indilog.calls`)."""

from __future__ import annotations

from typing import Final

import msgspec

RECORD_TAGS_LIMIT: Final = 254
"""Tags of a record, whatever `record_tags_max` says."""
BATCH_RECORDS_LIMIT: Final = 100_000
"""Records in a batch, whatever `batch_records_max` says."""
BATCH_TAGS_LIMIT: Final = 1_000_000
"""Tags of all records in a batch."""
SOURCES_LIMIT: Final = 10_000
"""Files of a deployment."""


class LinkStruct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages on a link."""
