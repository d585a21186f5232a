"""What the gateway counts, for `/status` and `/metrics`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_DOCUMENTATION = {
    "clients_left": "Requests whose client closed its connection before the answer",
}


@dataclasses.dataclass
class GatewayFigures:
    """Counts since the gateway started.

    Attributes:
        clients_left: requests whose client closed its connection before the answer: with a body
            that did not arrive whole, or while the request waited.
    """

    clients_left: int = 0

    def status(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


class GatewayCollector(Collector):
    """Reads the gateway's counts at a scrape."""

    def __init__(self, figures: GatewayFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield one family per count."""
        for name, value in self._figures.status().items():
            yield CounterMetricFamily(f"indilog_gateway_{name}", _DOCUMENTATION[name], value=value)
