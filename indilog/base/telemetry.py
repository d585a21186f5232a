"""Structured logs (structlog) and metrics (Prometheus) of a process.

Nothing is configured at import. A process calls `configure_logging` once, at its start; modules get
their logger from `structlog.get_logger`. Updating a metric costs an integer addition: every role's
shell owns a `Metrics`, and a collector reads the numbers when `/metrics` is scraped. There is no
global registry, so several platforms may run in one process.
"""

from __future__ import annotations

import logging
import sys
import time  # noqa: TID251 - clock of the process's log
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final, Literal, TextIO, TypeAlias, cast

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from indilog.base.errors import ConfigError
from indilog.base.log_repeats import Repeats

LogFormat: TypeAlias = Literal["json", "console"]
SYNC_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
_LEVELS: Final = ("debug", "info", "warning", "error")


# --- logs


_LOGS_EACH_REQUEST: Final = ("httpx", "botocore.credentials", "urllib3")
"""Loggers of client libraries that write a line for each request at the level `info`."""


class _Unfailing:
    """Wraps a stream whose reader may disappear. Output that cannot be written is dropped.

    A node may outlive its supervisor, and so the terminal or pipe that receives its lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`; drop it if the stream fails."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore its failure."""
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()


def configure_logging(
    log_format: LogFormat = "json",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    processors: Sequence[structlog.typing.Processor] = (),
    counts_repeats: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send every log line of this process to `stream` (default: standard error), one line per
    event.

    Lines of the standard library's loggers (such as uvicorn's) have the same form. May be called
    again; the last call takes effect. `processors` are applied to each line first. If
    `counts_repeats` is set, repeated lines are limited (`indilog.base.log_repeats`) by the time of
    `clock`. Otherwise the process that reads the lines limits them.

    Raises:
        ConfigError: the level is unknown.
    """
    if level not in _LEVELS:
        raise ConfigError(f"The log level must be one of {', '.join(_LEVELS)}, not {level!r}.")
    stream = cast("TextIO", _Unfailing(stream or sys.stderr))
    shared: list[structlog.typing.Processor] = [
        *processors,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _rendering(log_format, stream)
    repeats = [Repeats(_tell, clock=clock)] if counts_repeats else []
    structlog.configure(
        processors=[*shared, *repeats, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    for counting in repeats:
        handler.addFilter(_RepeatsFilter(counting))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "info":
        for name in _LOGS_EACH_REQUEST:
            logging.getLogger(name).setLevel(logging.WARNING)


class _RepeatsFilter(logging.Filter):
    """Limits repeated lines of the standard library's loggers. Lines with the same message format
    are of one kind.
    """

    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self._repeats = repeats

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is to be written."""
        level = record.levelname.lower()
        return self._repeats.is_written(record.name, level, str(record.msg))


def _tell(event: str, **fields: object) -> None:
    structlog.get_logger().warning(event, **fields)


def quiet_unless_configured() -> None:
    """Restrict a program without a log configuration to warnings and errors, on standard error.

    The embedded platform and clients run inside another program, and structlog would write to that
    program's standard output.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                Repeats(_tell),
                *_rendering("console", sys.stderr),
            ],
            wrapper_class=structlog.make_filtering_bound_logger("warning"),
            logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        )


def _rendering(log_format: LogFormat, stream: TextIO) -> list[structlog.typing.Processor]:
    if log_format == "console":
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


# --- metrics


class SyncTimes:
    """A histogram of the durations of disk syncs, with the buckets `SYNC_BUCKETS_S`."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SYNC_BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one sync."""
        self.counts[bisect_left(SYNC_BUCKETS_S, duration_s)] += 1
        self.total_s += duration_s


class Metrics:
    """The metrics of one node; its shell, roles and transport update them.

    Counters only grow. Counters with a label are mappings: `metrics.ignored["old epoch"] += 1`.
    Labels are names from the code (message kinds, reasons, outcomes), never received text, so their
    number is bounded.
    """

    __slots__ = (
        "appended",
        "corrected",
        "damaged",
        "dropped",
        "ignored",
        "node",
        "received",
        "repaired",
        "rewrites",
        "rewritten_bytes",
        "sent",
        "sent_bytes",
        "syncs",
    )  # fmt: skip

    def __init__(self, node: str) -> None:
        self.node = node
        self.sent: defaultdict[str, int] = defaultdict(int)
        """Messages sent, by kind."""
        self.received: defaultdict[str, int] = defaultdict(int)
        """Messages received, by kind."""
        self.dropped: defaultdict[str, int] = defaultdict(int)
        """Messages dropped, by reason."""
        self.ignored: defaultdict[str, int] = defaultdict(int)
        """Messages and other events that a role ignored, by reason."""
        self.sent_bytes = 0
        self.appended = 0
        self.damaged = 0
        self.corrected = 0
        self.repaired = 0
        self.rewrites = 0
        self.rewritten_bytes = 0
        self.syncs = SyncTimes()


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
