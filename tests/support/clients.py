"""HTTP clients for tests of a platform that requires its token: they find the token as every
program on this machine does (`indilog.link.access`).
"""

from __future__ import annotations

import httpx

from indilog.link.access import reach


def http_client(url: str, *, timeout: float = 60.0) -> httpx.AsyncClient:
    """Return a client of the platform at `url` that carries its token."""
    return httpx.AsyncClient(**reach(url).for_httpx, timeout=timeout)


def token_headers(url: str) -> dict[str, str]:
    """Return the headers of a request to the platform at `url`."""
    return reach(url).headers
