"""HTTP clients for tests of a platform that requires its token: they find the token as every
program on this machine does (`indilog.link.access`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from indilog.link.access import reach


def http_client(url: str, *, timeout: float = 150.0) -> httpx.AsyncClient:
    """Return a client of the platform at `url` that carries its token."""
    return httpx.AsyncClient(**reach(url).for_httpx, timeout=timeout)


@contextmanager
def command_clients_closed() -> Iterator[None]:
    """Close the connections of commands that run in this process; a process closes its own."""
    opened: list[httpx.Client] = []
    real = httpx.Client

    def client(**given: Any) -> httpx.Client:  # noqa: ANN401
        opened.append(real(**given))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(httpx, "Client", client)
        try:
            yield
        finally:
            for made in opened:
                made.close()


def token_headers(url: str) -> dict[str, str]:
    """Return the headers of a request to the platform at `url`."""
    return reach(url).headers
