"""The services outside of the platform, for the demo and the tests: payments, parcels and mails.

They behave like real services. They fail at random, sometimes after they have executed the request.
They answer a repeated idempotency key with the first answer. They keep their own book, and the
check compares the log with this book. A seed decides which requests fail.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

DECLINED_CARD: Final = "card-declined"
"""The payment service declines this card."""
UNREACHED_CITY: Final = "Atlantis"
"""The carrier does not deliver to this city."""
KEY_LENGTH_MAX: Final = 255
_BODY_BYTES_MAX: Final = 65_536
_CONNECTION_S_MAX: Final = 60.0


class Book:
    """The executed requests of all services, by order.

    Attributes:
        charged: cents taken, with an entry for each charge.
        refunded: cents returned.
        shipped: number of parcels at the carrier.
        mails: how often a mail of an order and status was sent.
        repeated: number of requests that got the first answer of their key again.
        failed: number of requests that failed at random.
    """

    def __init__(self) -> None:
        self.charged: dict[str, list[int]] = {}
        self.refunded: Counter[str] = Counter()
        self.shipped: Counter[str] = Counter()
        self.mails: Counter[tuple[str, str]] = Counter()
        self.repeated = 0
        self.failed = 0
        self._closed: set[tuple[str, str]] = set()
        self._answers: dict[tuple[str, str], dict[str, str]] = {}

    def taken(self, order: str) -> int:
        """Return the cents taken for an order and not returned."""
        return sum(self.charged.get(order, ())) - self.refunded[order]

    def answer(self, what: str, key: str, asked: dict[str, Any]) -> dict[str, str]:
        """Execute a request; for a repeated key, return the first answer of the key.

        Raises:
            KeyError: there is no such service, or the request lacks a field.
        """
        if (known := self._answers.get((what, key))) is not None:
            self.repeated += 1
            return known
        refused = self._done(what, asked)
        told = {"refused": refused} if refused else {"id": f"{what}-{len(self._answers) + 1}"}
        self._answers[what, key] = told
        return told

    def _done(self, what: str, asked: dict[str, Any]) -> str:
        """Execute a request; return why the service refuses it, or an empty text."""
        order = asked["order"]
        if (what, order) in self._closed:
            return f"the order's {what} were undone"
        match what:
            case "payments":
                if asked["card"] == DECLINED_CARD:
                    return "the card was declined"
                self.charged.setdefault(order, []).append(asked["amount"])
            case "refunds":
                self._closed.add(("payments", order))
                self.refunded[order] += self.taken(order)
            case "parcels":
                if asked["city"] == UNREACHED_CITY:
                    return f"no carrier delivers to {UNREACHED_CITY}"
                self.shipped[order] += 1
            case "recalls":
                self._closed.add(("parcels", order))
                self.shipped[order] = 0
            case "mails":
                self.mails[order, asked["status"]] += 1
            case _:
                raise KeyError(what)
        return ""


class Services:
    """The services as one HTTP server on this machine; see `services`.

    Attributes:
        url: base URL.
        book: the book of the services; read it when no request is running.
    """

    def __init__(self, *, seed: int, failing: float) -> None:
        self.url = ""
        self.book = Book()
        self._failing = failing
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._lock = threading.Lock()

    def handle(self, what: str, key: str, asked: dict[str, Any]) -> dict[str, str] | None:
        """Handle a request; None: the request fails, before or after it was executed."""
        with self._lock:
            fails = self._choose.random() < self._failing
            if fails:
                self.book.failed += 1
                if self._choose.random() < 0.5:
                    return None
            told = self.book.answer(what, key, asked)
            return None if fails else told


@contextmanager
def services(*, seed: int = 1, failing: float = 0.2, port: int = 0) -> Iterator[Services]:
    """Run the services on this machine while the block runs.

    Args:
        seed: decides which requests fail.
        failing: share of the requests that fail (0 to 1); half of them fail after their execution.
        port: port on the loopback address; 0: any free port.
    """
    running = Services(seed=seed, failing=failing)

    class Handler(_Handler):
        services = running

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    running.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection to the services."""

    services: ClassVar[Services]
    timeout = _CONNECTION_S_MAX

    def do_POST(self) -> None:
        """Handle `POST /{payments,refunds,parcels,recalls,mails}` with an Idempotency-Key."""
        key = self.headers.get("idempotency-key", "")
        length = self.headers.get("content-length", "")
        if not 0 < len(key) <= KEY_LENGTH_MAX:
            self._tell(400, {"refused": f"Send an Idempotency-Key of 1 to {KEY_LENGTH_MAX}."})
            return
        if not length.isdigit() or int(length) > _BODY_BYTES_MAX:
            self._tell(413, {"refused": f"Send at most {_BODY_BYTES_MAX:,} bytes."})
            return
        try:
            asked = json.loads(self.rfile.read(int(length)))
            told = self.services.handle(self.path.strip("/"), key, asked)
        except (ValueError, KeyError, TypeError) as error:
            self._tell(400, {"refused": f"The request is not as expected: {error!r}."})
            return
        if told is None:
            self._tell(503, {})
        else:
            self._tell(200, told)

    def _tell(self, status: int, told: dict[str, str]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the class
        """Log nothing: the demo shows its progress on the terminal."""
