"""Counters of the gateway, for `/status` and `/metrics`.

The modules of the gateway increment `GatewayCounters`, which `GatewayResources` holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTERS: Final = {
    "clients_left": "Requests whose client closed its connection before the answer",
    "clients_too_slow": "Connections closed because a request or an answer took too long",
    "connections_refused": "Connections beyond the limit",
    "requests_malformed": "Requests that are not valid HTTP",
    "bytes_refused": "Requests and messages refused because the byte budget was full",
    "calls_forwarded": "Calls that another compute node took",
    "calls_forwarded_refused": "Times that another compute node had no room for a call",
    "calls_forwarded_lost": "Forwarded calls whose compute node was lost before it answered",
    "calls_taken": "Calls taken from other compute nodes",
    "requests_refused": "Requests refused before routing: name, origin, token or body type",
}
_GAUGES: Final = {
    "connections": "Connections that are open",
    "bytes": "Bytes of requests and answers held in the gateway",
}


@dataclasses.dataclass
class GatewayCounters:
    """Counts since the gateway started.

    Attributes:
        clients_left: requests whose client disconnected before the answer, or before the body was
            complete.
        clients_too_slow: connections closed because a request took too long to arrive, or the
            client took too long to read the answer.
        connections_refused: connections refused beyond `connections_max`.
        requests_malformed: requests that are not valid HTTP.
        requests_refused: requests that `guard` refused before routing (unknown host name, foreign
            origin, no token, or a wrong type of body), and gRPC connections beyond the limit.
        calls_forwarded: calls that another compute node took.
        calls_forwarded_refused: number of times that another compute node had no room for a call.
        calls_forwarded_lost: forwarded calls whose compute node was lost before it answered.
        calls_taken: calls taken from other compute nodes.
    """

    clients_left: int = 0
    clients_too_slow: int = 0
    connections_refused: int = 0
    requests_malformed: int = 0
    requests_refused: int = 0
    calls_forwarded: int = 0
    calls_forwarded_refused: int = 0
    calls_forwarded_lost: int = 0
    calls_taken: int = 0

    def status(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


class GatewayCollector(Collector):
    """Reads the gateway's counters when Prometheus scrapes."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per counter or gauge."""
        status = self._read()
        for name, documentation in _COUNTERS.items():
            yield CounterMetricFamily(f"indilog_gateway_{name}", documentation, value=status[name])
        for name, documentation in _GAUGES.items():
            yield GaugeMetricFamily(f"indilog_gateway_{name}", documentation, value=status[name])
