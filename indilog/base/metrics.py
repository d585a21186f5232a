"""The metrics of a node.

Each node (`indilog.runtime.node`) owns one `Metrics`. An update costs an integer addition. A
collector (`indilog.base.exposition`) reads the numbers when `/metrics` is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

SYNC_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)


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
