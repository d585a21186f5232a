"""Logs (`indilog.base.telemetry`)."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog

from indilog.base.errors import ConfigError
from indilog.base.telemetry import configure_logging, quiet_unless_configured


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


@pytest.mark.parametrize("configure", [configure_logging, quiet_unless_configured])
def test_a_reader_of_standard_error_that_stops_reading_blocks_nothing(
    configure: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    structlog.reset_defaults()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        configure()
        for number in range(200):
            structlog.get_logger().warning(f"line {number}")
        found = b""
        while b"line 199" not in found:  # else the thread could write to another test's file
            found += os.read(reading, 1 << 16)
        os.close(reading)


def test_an_unknown_level_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="The log level must be one of"):
        configure_logging(level="loud")
