"""Renders metrics (`indilog.base.metrics`) in Prometheus's text format, for the gateway.

Collectors read the numbers when `/metrics` is scraped. There is no global registry, so several
platforms may run in one process. Only a process with a gateway imports this module, because
prometheus_client imports an HTTP server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from indilog.base.metrics import SYNC_BUCKETS_S, Metrics

_LABELLED: Final = (
    ("sent", "indilog_messages_sent", "Messages sent, by kind", "kind"),
    ("received", "indilog_messages_received", "Messages received, by kind", "kind"),
    ("dropped", "indilog_messages_dropped", "Messages dropped, by reason", "reason"),
    ("ignored", "indilog_events_ignored", "Messages and events ignored, by reason", "reason"),
)
_PLAIN: Final = (
    ("sent_bytes", "indilog_sent_bytes", "Bytes sent to other processes"),
    ("appended", "indilog_records_appended", "Records appended and acknowledged"),
    ("damaged", "indilog_damaged", "Damaged places found on disk, at starts, reads and scrubs"),
    ("corrected", "indilog_corrected_bits", "Flipped bits on disk that were corrected"),
    ("repaired", "indilog_repaired_batches", "Lost batches fetched from another replica"),
    ("rewrites", "indilog_rewrites", "Segment files rewritten without their dead frames"),
    ("rewritten_bytes", "indilog_rewritten_bytes", "Bytes written to rewrite segment files"),
)


class _NodeCollector(Collector):
    """Collects the metrics of some nodes at each scrape."""

    def __init__(self, nodes: Iterable[Metrics]) -> None:
        self._nodes = tuple(nodes)

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name, a sample per node and label."""
        for attribute, name, documentation, label in _LABELLED:
            counters = CounterMetricFamily(name, documentation, labels=("node", label))
            for node in self._nodes:
                for value, count in sorted(getattr(node, attribute).items()):
                    counters.add_metric((node.node, value), count)
            yield counters
        for attribute, name, documentation in _PLAIN:
            counters = CounterMetricFamily(name, documentation, labels=("node",))
            for node in self._nodes:
                counters.add_metric((node.node,), getattr(node, attribute))
            yield counters
        yield self._sync_histogram()

    def _sync_histogram(self) -> Metric:
        family = HistogramMetricFamily(
            "indilog_sync_seconds", "Durations of disk syncs", labels=("node",)
        )
        edges = [*map(str, SYNC_BUCKETS_S), "+Inf"]
        for node in self._nodes:
            sums = accumulate(node.syncs.counts)
            family.add_metric((node.node,), list(zip(edges, sums, strict=True)), node.syncs.total_s)
        return family


class StatusCollector(Collector):
    """Collects numbers by part and name at each scrape."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, Mapping[str, object]]],
        name: str = "indilog_engine",
        documentation: str = "Counters of the engine, by part",
    ) -> None:
        self._read = read
        self._name = name
        self._documentation = documentation

    def collect(self) -> Iterator[Metric]:
        """Yield one family with a sample per number."""
        family = GaugeMetricFamily(self._name, self._documentation, labels=("part", "figure"))
        for part, counters in self._read().items():
            for figure, value in counters.items():
                if isinstance(value, int | float):
                    family.add_metric((part, figure), value)
        yield family


def registry_of(nodes: Iterable[Metrics]) -> CollectorRegistry:
    """Return a separate registry that collects these nodes' metrics at each scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_NodeCollector(nodes))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the metrics of a registry in Prometheus's text format, the body of `/metrics`."""
    return generate_latest(registry)
