"""The stream of log lines (`indilog.base.log_stream`)."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indilog.base.log_stream import WAITING_BYTES_MAX, LogStream

LINE = "x" * 999 + "\n"
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, LogStream]]:
    """A pipe with room for one page, and a stream that writes to it."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(writing, "w") as stream:
        yield reading, LogStream(stream)
        os.close(reading)


def test_a_reader_that_stops_reading_does_not_block_the_writer(pipe: tuple[int, LogStream]) -> None:
    reading, stream = pipe
    for _ in range(100):
        stream.write(LINE)
    assert b"".join(os.read(reading, 1000) for _ in range(100)) == LINE.encode() * 100
    stream.drain()


def test_lines_beyond_a_limit_are_dropped_and_counted(pipe: tuple[int, LogStream]) -> None:
    reading, stream = pipe
    count = 2 * WAITING_BYTES_MAX // len(LINE)
    for _ in range(count):
        stream.write(LINE)
    found = b""
    while b"dropped" not in found:
        found += os.read(reading, 1 << 16)
    written, waited = found.count(LINE.encode()), WAITING_BYTES_MAX // len(LINE)
    assert waited <= written <= waited + PIPE_BYTES // len(LINE), "the thread may begin at once"
    assert b'"lines": %d}' % (count - written) in found
    stream.write("later\n")
    assert b"later\n" in os.read(reading, 1 << 16)


def test_a_file_has_each_line_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        stream = LogStream(file)
        stream.write("a line\n")
        stream.flush()
        assert (tmp_path / "log").read_text() == "a line\n"


def test_a_stream_in_memory_has_each_line_at_once() -> None:
    memory = io.StringIO()
    LogStream(memory).write("a line\n")
    assert memory.getvalue() == "a line\n"


def test_a_closed_reader_is_ignored(pipe: tuple[int, LogStream]) -> None:
    reading, stream = pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), reading)
    for _ in range(10):
        stream.write(LINE)
    stream.drain()


PROGRAM = """
import os, structlog
from indilog.base.telemetry import configure_logging
configure_logging()
structlog.get_logger().info("before")
if child := os.fork():
    os.waitpid(child, 0)
structlog.get_logger().info("after", child=not child)
"""


def test_lines_at_the_end_of_a_process_and_of_a_forked_one_are_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, check=True, text=True
    )
    assert done.stderr.count('"before"') == 1
    assert done.stderr.count('"after"') == 2
