"""Calls of the services outside of the platform: payments, parcels, mails.

Each request carries an idempotency key. A service answers a repeated key with its first answer, so
a request whose answer was lost is simply sent again. The workflow in `app` and the sender in
`mails` call this module.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import httpx

from bokistore import Store

from .sales import Sale, settings_of

logging.getLogger("httpx").setLevel(logging.WARNING)  # no line for each request

TIMEOUT_S: Final = 5.0
"""Seconds until a request without an answer counts as failed, and is sent again."""


class ServiceError(Exception):
    """A service did not answer, or failed; the same request may be sent again with its key."""


@dataclass(frozen=True)
class ServiceAnswer:
    """A decided answer of a service: the id of the executed request, or why it was refused."""

    id: str
    refused: str = ""


async def charge(store: Store, sale: Sale, card: str, key: str) -> ServiceAnswer:
    """Take the order's total from the card."""
    asked = {"order": sale.id, "card": card, "amount": sale.total}
    return await _ask(store, "payments", key, asked)


async def refund(store: Store, order: str, key: str) -> ServiceAnswer:
    """Return the money that was taken for an order, even if the answer to the charge was lost.
    Later charges of the order are refused.
    """
    return await _ask(store, "refunds", key, {"order": order})


async def ship(store: Store, sale: Sale, key: str) -> ServiceAnswer:
    """Hand the order's parcel to the carrier."""
    return await _ask(store, "parcels", key, {"order": sale.id, "city": sale.city})


async def recall(store: Store, order: str, key: str) -> ServiceAnswer:
    """Have the carrier return an order's parcel; later parcels of the order are refused."""
    return await _ask(store, "recalls", key, {"order": order})


async def send_mail(store: Store, mail: dict[str, Any]) -> ServiceAnswer:
    """Send a mail; order and status are its key, so that each status is mailed once."""
    return await _ask(store, "mails", f"{mail['order']}.{mail['status']}", mail)


async def _ask(store: Store, what: str, key: str, content: dict[str, Any]) -> ServiceAnswer:
    """Send one request.

    Raises:
        ServiceError: the service failed or did not answer; it may have executed the request.
    """
    url = (await settings_of(store)).services
    scheme = url.partition(":")[0]
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=_tls(scheme)) as http:
            answer = await http.post(
                f"{url}/{what}", json=content, headers={"idempotency-key": key}
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceError(f"The service for {what} at {url!r} does not answer: {error}") from error
    if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise ServiceError(f"The service for {what} failed: {answer.status_code}.")
    told = answer.json()
    return ServiceAnswer(str(told.get("id", "")), str(told.get("refused", "")))


@cache
def _tls(scheme: str) -> ssl.SSLContext:
    """Return a TLS context. Without TLS the context has no certificates, because loading them takes
    longer than a request.
    """
    if scheme == "https":
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
