"""What the gateway counts, for `/status` and `/metrics`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTERS: Final = {
    "clients_left": "Requests whose client closed its connection before the answer",
    "clients_too_slow": "Connections closed since a request or an answer took too long",
    "connections_refused": "Connections beyond the limit",
    "requests_malformed": "Requests that are no HTTP",
    "bytes_refused": "Requests and messages refused since too many bytes waited",
    "requests_refused": "Requests that broke a rule of names, origins, tokens or types of bodies",
}
_GAUGES: Final = {
    "connections": "Connections that are open",
    "bytes": "Bytes that wait in the gateway",
}


@dataclasses.dataclass
class GatewayFigures:
    """Counts since the gateway started.

    Attributes:
        clients_left: requests whose client closed its connection before the answer: with a body
            that did not arrive whole, or while the request waited.
        clients_too_slow: connections that were closed since a request took too long to arrive, or
            an answer to be read.
        connections_refused: connections beyond the limit.
        requests_malformed: requests that are no HTTP.
        requests_refused: that no route saw: of a foreign name or origin, without the token, or with
            a body of another type (`guard`).
    """

    clients_left: int = 0
    clients_too_slow: int = 0
    connections_refused: int = 0
    requests_malformed: int = 0
    requests_refused: int = 0

    def status(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


class GatewayCollector(Collector):
    """Reads the gateway's figures at a scrape."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield one family per figure."""
        figures = self._read()
        for name, told in _COUNTERS.items():
            yield CounterMetricFamily(f"indilog_gateway_{name}", told, value=figures[name])
        for name, told in _GAUGES.items():
            yield GaugeMetricFamily(f"indilog_gateway_{name}", told, value=figures[name])
