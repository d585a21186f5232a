"""Metrics as `/metrics` shows them (`indilog.base.exposition`)."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from indilog.base.exposition import StatusCollector, exposition, registry_of
from indilog.base.metrics import Metrics


def _node_first(label: tuple[str, str]) -> bool:
    return label[0] != "node"


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Return the value of each (name, node, further label)."""
    return {
        (sample.name, *(v for _, v in sorted(sample.labels.items(), key=_node_first))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_are_read_at_each_scrape() -> None:
    node = Metrics("storage-0")
    registry = registry_of([node])
    node.sent["ShardProgress"] += 2
    node.ignored["old epoch"] += 1
    node.appended += 64
    seen = samples(exposition(registry))
    assert seen["indilog_messages_sent_total", "storage-0", "ShardProgress"] == 2
    assert seen["indilog_events_ignored_total", "storage-0", "old epoch"] == 1
    assert seen["indilog_records_appended_total", "storage-0"] == 64


def test_several_nodes_of_one_process_share_a_page() -> None:
    first, second = Metrics("index-0-0"), Metrics("index-1-0")
    first.appended, second.appended = 1, 2
    seen = samples(exposition(registry_of([first, second])))
    assert seen["indilog_records_appended_total", "index-0-0"] == 1
    assert seen["indilog_records_appended_total", "index-1-0"] == 2


def test_syncs_fall_into_cumulative_buckets() -> None:
    node = Metrics("storage-0")
    for duration_s in (0.00005, 0.0001, 0.0003, 7.0):
        node.syncs.observe(duration_s)
    seen = samples(exposition(registry_of([node])))
    assert seen["indilog_sync_seconds_bucket", "storage-0", "0.0001"] == 2
    assert seen["indilog_sync_seconds_bucket", "storage-0", "0.0005"] == 3
    assert seen["indilog_sync_seconds_bucket", "storage-0", "1.0"] == 3
    assert seen["indilog_sync_seconds_bucket", "storage-0", "+Inf"] == 4
    assert seen["indilog_sync_seconds_count", "storage-0"] == 4
    assert seen["indilog_sync_seconds_sum", "storage-0"] == pytest.approx(7.00045)


def test_gauges_are_computed_at_scrape_time() -> None:
    hits = 3
    registry = registry_of([])
    registry.register(StatusCollector(lambda: {"suffix": {"hits": hits}}))
    hits = 9
    assert 9.0 in samples(exposition(registry)).values()
