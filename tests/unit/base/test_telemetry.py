"""Logs and metrics (`indilog.base.telemetry`)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from indilog.base.errors import ConfigError
from indilog.base.telemetry import (
    Metrics,
    StatusCollector,
    configure_logging,
    exposition,
    registry_of,
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for name in ("httpx", "botocore.credentials", "urllib3"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def _node_first(label: tuple[str, str]) -> bool:
    return label[0] != "node"


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Return the value of each (name, node, further label)."""
    return {
        (sample.name, *(v for _, v in sorted(sample.labels.items(), key=_node_first))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_log_line_is_one_json_object() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger().warning("torn tail cut", segment=3)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["segment"]) == ("torn tail cut", "warning", 3)
    assert line["timestamp"].endswith("Z")


def test_requests_of_client_libraries_are_logged_only_if_they_matter() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("httpx").info("HTTP Request: GET http://x")
    assert not stream.getvalue()
    logging.getLogger("httpx").warning("slow")
    assert json.loads(stream.getvalue())["event"] == "slow"


def test_lines_of_the_standard_library_have_the_same_format() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("uvicorn").info("listening on %d", 8080)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"]) == ("listening on 8080", "info")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_an_exception_is_logged_with_its_traceback(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging(log_format, "info", stream)  # type: ignore[arg-type]
    try:
        int("planted")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: invalid literal" in stream.getvalue()


def test_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    configure_logging("console", "warning", stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("uvicorn").info("quiet")
    assert stream.getvalue() == ""


def test_an_unknown_level_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="The log level must be one of"):
        configure_logging(level="loud")


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
