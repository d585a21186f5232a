"""The base class of all messages on a link.

`link_messages`, `worker_messages` and `retention_messages` define the messages.
"""

from __future__ import annotations

from typing import Final

import msgspec

SOURCES_LIMIT: Final = 10_000
"""Largest number of files in a deployment."""


class LinkStruct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages on a link."""
