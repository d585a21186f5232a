"""Finds the address, token and certificate of a platform's gateway, for clients and the command
line.

A token is sent only to its own platform. The first of these sources that has a token is used:

1. the caller (`indilog.connect(url, token=...)`);
2. `INDILOG_TOKEN`, which is sent only to the URL in `INDILOG_URL` (default: `DEFAULT_URL`);
3. the token file of the platform at the URL, if this user runs that platform on this machine
   (`indilog.base.running_platforms`).

With source 3, `http://localhost:PORT` is replaced by the literal address on which the platform
listens, because another user may listen on the same port of another loopback address. No token is
sent to another machine over plain HTTP.
"""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from indilog.base.errors import ConfigError
from indilog.base.loopback import is_loopback
from indilog.base.running_platforms import RunningPlatform, platform_at

if TYPE_CHECKING:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:8080"
URL_VARIABLE: Final = "INDILOG_URL"
TOKEN_VARIABLE: Final = "INDILOG_TOKEN"  # noqa: S105 - the variable's name, not a secret
CA_VARIABLE: Final = "INDILOG_CA"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """URL, token and TLS context with which a client reaches a gateway.

    Attributes:
        url: URL without a trailing slash.
        token: token of the platform; empty if none is known.
        tls: TLS context for `https://`; None: plain HTTP.
        transport: carries requests to a gateway in this process; None: over the network.
    """

    url: str
    token: str = dataclasses.field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    transport: httpx.AsyncBaseTransport | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def for_httpx(self) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
        if self.transport is not None:
            return {"base_url": self.url, "transport": self.transport}
        # Without TLS, an empty context keeps httpx from loading the system's certificates.
        verify = self.tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return {"base_url": self.url, "headers": self.headers, "verify": verify, "trust_env": False}


def check_url(url: str) -> str:
    """Return the URL of a gateway, without a trailing slash.

    Raises:
        ValueError: the address is not a URL; the message has an example.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, AttributeError):  # an invalid port; a value that is not text
        is_one = False
    if not is_one:
        raise ValueError(
            f"A platform's URL has the form {DEFAULT_URL}, with http:// or https:// before the "
            "host, "
            f"not {url!r}."
        )
    return url.rstrip("/")


def segment(text: str) -> str:
    """Return a text as one part of the path of a URL."""
    return quote(text, safe="").replace(".", "%2E")  # otherwise "." alone is removed from the path


def unauthorized_at(url: str) -> str:
    """Return the error message for a caller whose token the platform at `url` refuses."""
    return (
        f"The platform at {url} needs its token: run `indilog token` as the user that runs it, on "
        "its "
        "machine; elsewhere set INDILOG_URL and INDILOG_TOKEN."
    )


def reach(
    url: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Endpoint:
    """Return how to reach the gateway at `url`.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT`.
        token: token of that platform; None: look it up in the order above.
        ca: file with the certificates that `https://` trusts. None: the file in `INDILOG_CA`; if
            that is not set, the certificate of the platform, if it runs on this machine; otherwise
            the system's certificates.
        environment: environment variables; it may have `INDILOG_TOKEN`, `INDILOG_URL` and
            `INDILOG_CA`.

    Raises:
        ValueError: the URL or the token is malformed.
        ConfigError: the token would be sent to another machine over plain HTTP, or a file cannot be
            read.
    """
    url = check_url(url)
    local = platform_at(url)
    token = token if token is not None else _token_from(environment, url)
    if token is None and local is not None:
        token = _token_in(local)
        if urlsplit(url).scheme == "http":
            url = local.url + urlsplit(url).path
    token = token or ""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("A token must be ASCII text without spaces; `indilog token` prints it.")
    parts = urlsplit(url)
    assert parts.hostname, "`check_url` has checked it"
    if token and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"The token is not sent to {parts.hostname} over http://, where it could be "
            "intercepted; "
            "use https://, or a tunnel to an address of this machine."
        )
    tls = None
    if parts.scheme == "https":
        tls = _tls(ca or environment.get(CA_VARIABLE) or None, local)
    return Endpoint(url, token, tls)


def _token_from(environment: Mapping[str, str], url: str) -> str | None:
    """Return the environment's token if it belongs to `url`."""
    token = environment.get(TOKEN_VARIABLE)
    if not token:
        return None
    belongs_to = environment.get(URL_VARIABLE) or DEFAULT_URL
    return token.strip() if url == belongs_to.rstrip("/") else None


def _token_in(platform: RunningPlatform) -> str:
    if not platform.token_file:
        return ""
    try:
        return Path(platform.token_file).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"The token of the platform at {platform.url} cannot be read from "
            f"{platform.token_file}: {error.strerror}."
        ) from error


def _tls(ca: str | Path | None, local: RunningPlatform | None) -> ssl.SSLContext:
    if ca is None and local is None:
        return ssl.create_default_context()
    file = Path(ca) if ca is not None else Path(local.certificate if local else "")
    try:
        context = ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The certificates in {file} cannot be used: {error}.") from error
    # The trusted certificate may be the gateway's own, without its issuer.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
