"""Follows a log for the command line: prints records as they arrive, over server-sent events.

If the platform becomes unreachable, the command waits for it and continues at the next seqnum. So
no record is missed or printed twice. `indilog log read` and `indilog log tail` call `follow`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from indilog.cli.gateway import Gateway

if TYPE_CHECKING:
    import httpx

RESUME_S: Final = 60.0
"""Seconds to wait for an unreachable platform."""
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 2.0
_SSE_DATA: Final = "data: "


def follow(
    gateway: Gateway,
    path: str,
    bound: int | None,
    show: Callable[[dict[str, Any]], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    **query: object,
) -> None:
    """Print records from `bound` on, until interrupted. If the platform stays unreachable, end with
    a sentence.

    Without a bound the platform begins at the first record that is not trimmed.
    """
    follower = _StreamPrinter(gateway, path, bound, show, query)
    away_since: float | None = None
    pause_s = _PAUSE_S_MIN
    while True:
        error = follower.stream()
        if not follower.opened:
            gateway.unreachable(error)
        now = clock()
        if follower.has_received or away_since is None:
            away_since, pause_s = now, _PAUSE_S_MIN
            _tell(f"The platform is unreachable; waiting up to {RESUME_S:g} s for it.")
        elif now > away_since + RESUME_S:
            gateway.unreachable(error)
        sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


class _StreamPrinter:
    """Prints records from successive streams.

    Attributes:
        opened: whether any stream was opened.
        has_received: whether the last stream sent any bytes.
    """

    def __init__(
        self,
        gateway: Gateway,
        path: str,
        bound: int | None,
        show: Callable[[dict[str, Any]], None],
        query: dict[str, object],
    ) -> None:
        self.opened = False
        self.has_received = False
        self._gateway = gateway
        self._path = path
        self._start = self._bound = bound
        self._show = show
        self._query = query

    def stream(self) -> httpx.HTTPError:
        """Print the records of one stream until it ends; return why it ended or was not opened."""
        import httpx

        self.has_received = False
        query = self._query | {"bound": self._bound}
        if self._bound != self._start:  # continue after the printed records, not at the given time
            query.pop("since", None)
        try:
            with self._gateway.lines(self._path, **query) as lines:
                self.opened = True
                for line in lines:
                    self.has_received = True
                    if line.startswith(_SSE_DATA):
                        record: dict[str, Any] = json.loads(line.removeprefix(_SSE_DATA))
                        self._bound = record["seqnum"] + 1
                        self._show(record)
        except httpx.HTTPError as error:
            return error
        return httpx.RemoteProtocolError("the stream ended")


def _tell(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
