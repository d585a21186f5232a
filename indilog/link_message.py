"""What all messages on a link have in common (`indilog.calls`)."""

from __future__ import annotations

import msgspec


class LinkStruct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages on a link."""
