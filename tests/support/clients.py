"""HTTP clients for tests that talk to a platform which wants its token: they find it as every
program on this machine does (`indilog.link.access`).
"""

from __future__ import annotations

import httpx

from indilog.link.access import reach


def http_client(url: str, *, timeout: float = 60.0) -> httpx.AsyncClient:
    """Return a client of the platform at `url` that carries its token."""
    return httpx.AsyncClient(**reach(url).for_httpx, timeout=timeout)


def token_headers(url: str) -> dict[str, str]:
    """Return what a request to the platform at `url` carries."""
    return reach(url).headers
