"""What workers print: attributed lines, any bytes, and no more than the limits."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import structlog

from indilog_compute.workers.output import LINE_BYTES_MAX, FunctionOutput, OutputLines, output_of


def logged(*chunks: bytes, lines_per_s_max: int = 100, bytes_per_s_max: int = 1 << 20) -> list[Any]:
    """Return what is logged of chunks that arrive at one moment, and then the end."""
    with structlog.testing.capture_logs() as seen:
        output = OutputLines(
            structlog.get_logger(),
            lines_per_s_max=lines_per_s_max,
            bytes_per_s_max=bytes_per_s_max,
        )
        for chunk in chunks:
            output.received(chunk, 0.0)
        output.ended()
    return list(seen)


HOSTILE = {
    "nested deeper than a decoder goes": b'{"event":' * 20_000,
    "nested whole": b'{"event":"x","a":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "not UTF-8 in JSON": b'{"event":"\xff\xfe"}',
    "not UTF-8": b"\xff\x00\xfe",
    "a lone surrogate": b'{"event":"x","line":"\\ud800"}',
    "fields of the logger's own": b'{"event":"x","self":1,"level":["a"],"exc_info":"y"}',
    "the platform's fields": b'{"event":"x","worker":7,"pid":7,"timestamp":"z"}',
    "an event that is no text": b'{"event":{"a":1},"level":9}',
    "a level of no name": b'{"event":"x","level":"notset"}',
    "a field with no name": b'{"event":"x","":1}',
    "longer than a line": b"x" * (3 * LINE_BYTES_MAX),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_the_line_after_any_bytes_is_logged(line: bytes) -> None:
    written = io.StringIO()
    logger = structlog.wrap_logger(
        structlog.WriteLogger(written),
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("debug"),
    )
    output = OutputLines(logger.bind(worker=1), lines_per_s_max=100, bytes_per_s_max=1 << 20)
    output.received(line + b"\n", 0.0)
    output.received(b"spoken\n", 0.0)
    seen = [json.loads(text) for text in written.getvalue().splitlines()]
    assert len(seen) >= 2
    assert seen[-1]["line"] == "spoken"
    assert all(reported["worker"] == 1 and "pid" not in reported for reported in seen)


def test_lines_that_arrive_in_pieces_are_put_together() -> None:
    assert [reported["line"] for reported in logged(b"a", b"b\nc", b"d", b"\ne")] == [
        "ab",
        "cd",
        "e",
    ]


def test_lines_above_the_rate_are_dropped_and_one_line_says_how_many() -> None:
    seen = logged(b"x\n" * 10, b"y\n" * 10, lines_per_s_max=4)
    assert [reported["line"] for reported in seen[:-1]] == ["x"] * 4
    assert (seen[-1]["event"], seen[-1]["lines"], seen[-1]["bytes"]) == (
        "worker output dropped", 16, 32,
    )  # fmt: skip


def test_bytes_above_the_rate_are_dropped_and_counted() -> None:
    seen = logged(b"x" * 900 + b"\n", b"y" * 200 + b"\n", b"z\nlast", bytes_per_s_max=1000)
    assert [reported.get("line", "")[:1] for reported in seen] == ["x", "y", ""]
    assert (seen[-1]["lines"], seen[-1]["bytes"]) == (2, 6)


def test_lines_are_logged_again_when_time_has_passed() -> None:
    with structlog.testing.capture_logs() as seen:
        output = OutputLines(structlog.get_logger(), lines_per_s_max=2, bytes_per_s_max=1 << 20)
        output.received(b"a\nb\nc\nhalf a li", 10.0)
        output.log_dropped()
        output.received(b"ne\nd\n", 11.0)
    assert [reported.get("line") for reported in seen] == ["a", "b", None, "d"]
    assert seen[2]["lines"] == 2


def printed(write: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    raw = io.StringIO()
    write(FunctionOutput(raw))
    return [json.loads(line) for line in raw.getvalue().splitlines()]


def test_printed_lines_name_their_application_and_invocation() -> None:
    def write(output: FunctionOutput) -> None:
        with output_of("shop", "i-1"):
            print("one", 2, file=output)
            print("no end", end="", file=output)
        print("no one's", file=output)

    assert printed(write) == [
        {"event": "worker output", "line": "one 2", "application": "shop", "invocation": "i-1"},
        {"event": "worker output", "line": "no end", "application": "shop", "invocation": "i-1"},
        {"event": "worker output", "line": "no one's"},
    ]


def test_lines_of_interleaved_calls_stay_apart() -> None:
    def write(output: FunctionOutput) -> None:
        with output_of("shop", "i-1"):
            output.write("a")
            with output_of("shop", "i-2"):
                output.write("b\n")
            output.write("c\n")

    assert [(reported["invocation"], reported["line"]) for reported in printed(write)] == [
        ("i-2", "b"),
        ("i-1", "ac"),
    ]


def test_any_text_can_be_printed() -> None:
    (reported,) = printed(lambda output: print('{"event":"spoof"} \ud800 \x00', file=output))
    assert reported == {"event": "worker output", "line": '{"event":"spoof"} \\ud800 \x00'}
