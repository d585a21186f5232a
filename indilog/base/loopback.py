"""Recognizes host names of the loopback interface.

For other hosts, the configuration and the transports require encryption and authentication.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

LOCALHOST: Final = "localhost"


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback address (IPv6 without brackets)."""
    if host == LOCALHOST:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
