"""Writes the output of functions as lines of the platform's log: the worker's side and the node's
side.

In the worker, `FunctionOutput` replaces standard output and standard error
(`starting.worker_process`). It writes each line as one JSON object with the application and the
invocation. Bytes that reach the pipe in another way (C code, child processes) have no such object.

On the compute node, `OutputLines` gets the bytes of the pipe (`process`) and accepts any bytes. It
logs a limited number of lines and bytes per second, and drops and counts all further ones. So a
worker never waits until its output is read.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TextIO

import msgspec
import structlog
from structlog.typing import EventDict

from indilog.base.log_repeats import limited_elsewhere

LINE_BYTES_MAX: Final = 64 * 1024
"""Length of the longest line in bytes; a longer line is logged in pieces."""
_UNAWAITED: Final = re.compile("coroutine '([^']+)' was never awaited")
_UNAWAITED_MAX: Final = 16
"""Largest number of coroutines of one context that are collected; any further one is only logged.
"""
_OUTPUT: Final = "worker output"
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""Known levels besides `info`; a line with an unknown level is logged with the level `info`."""
_RESERVED: Final = frozenset(
    {"event", "exc_info", "level", "pid", "self", "stack_info", "timestamp", "worker"}
)
"""Fields of a log line that only the platform or its logger may set."""


# --- in the worker


class Unawaited(NamedTuple):
    """A coroutine that was dropped before it was awaited, so its body never ran."""

    name: str
    file: str
    line: int


class _OutputSource:
    """A source of output: an application or one of its invocations.

    Attributes:
        rests: the incomplete line of each output stream.
        unawaited: the coroutines that this source dropped without awaiting them.
    """

    __slots__ = ("application", "invocation", "rests", "unawaited")

    def __init__(self, application: str, invocation: str) -> None:
        self.application = application
        self.invocation = invocation
        self.rests: dict[FunctionOutput, str] = {}
        self.unawaited: list[Unawaited] = []

    def end_lines(self) -> None:
        """Write the incomplete lines."""
        rests, self.rests = self.rests, {}
        for output, rest in rests.items():
            output.write_line(self, rest)


_OUTPUT_SOURCE: ContextVar[_OutputSource | None] = ContextVar("source", default=None)


class output_of:  # noqa: N801 - used like a function
    """Attribute output and log lines of this context to an application and an invocation.

    Tasks and threads that inherit this context are included.

    Args:
        application: name of the application.
        invocation: id of the invocation; empty: the code does not run in an invocation.
    """

    __slots__ = ("_speaker", "_token")

    def __init__(self, application: str, invocation: str = "") -> None:
        self._speaker = _OutputSource(application, invocation)

    @property
    def unawaited(self) -> list[Unawaited]:
        """The coroutines that this context dropped without awaiting them (`note_unawaited`)."""
        return self._speaker.unawaited

    def __enter__(self) -> None:
        """Begin the attribution."""
        self._token = _OUTPUT_SOURCE.set(self._speaker)

    def __exit__(self, *_: object) -> None:
        """Write the incomplete lines, and end the attribution."""
        _OUTPUT_SOURCE.reset(self._token)
        if self._speaker.rests:
            self._speaker.end_lines()


def note_unawaited() -> None:
    """From now on, log coroutines that are dropped before they are awaited, and let `output_of`
    collect them.

    Python warns when it frees such a coroutine. If the garbage collector frees a coroutine, the
    coroutine may belong to another context, so it is only logged. Other warnings are shown as
    before.
    """
    is_collecting = False

    def on_collection(phase: str, _info: Mapping[str, int]) -> None:
        nonlocal is_collecting
        is_collecting = phase == "start"

    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = _UNAWAITED.match(str(message))
        if found is None:
            shown(message, category, filename, lineno, file, line)
            return
        source = _OUTPUT_SOURCE.get()
        if source is not None and not is_collecting and len(source.unawaited) < _UNAWAITED_MAX:
            source.unawaited.append(Unawaited(found[1], filename, lineno))
        structlog.get_logger().error(
            "a coroutine was never awaited", coroutine=found[1], place=f"{filename}, line {lineno}"
        )

    gc.callbacks.append(on_collection)
    warnings.filterwarnings("always", _UNAWAITED.pattern, RuntimeWarning)
    warnings.showwarning = show


def attributed(_logger: object, _method: str, fields: EventDict) -> EventDict:
    """Add the application and the invocation to a log line; a processor for structlog."""
    source = _OUTPUT_SOURCE.get()
    if source is not None:
        fields.setdefault("application", source.application)
        if source.invocation:
            fields.setdefault("invocation", source.invocation)
    return fields


class FunctionOutput(io.TextIOBase):
    """Standard output or error of a worker: a text stream that writes whole lines, each with its
    application and invocation.

    Args:
        raw: the replaced stream.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._no_source = _OutputSource("", "")

    @property
    def buffer(self) -> Any:  # noqa: ANN401 - as of any text stream
        """The raw byte stream; bytes that are written to it have no application and invocation."""
        return self._raw.buffer

    def writable(self) -> bool:
        """Return True: text can be written."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of the raw stream."""
        return self._raw.fileno()

    def write(self, text: str) -> int:
        """Buffer text. A line is written when it is complete, or longer than `LINE_BYTES_MAX`."""
        source = _OUTPUT_SOURCE.get() or self._no_source
        *lines, rest = (source.rests.pop(self, "") + text).split("\n")
        if len(rest) > LINE_BYTES_MAX:
            lines.append(rest)
        elif rest:
            source.rests[self] = rest
        for line in lines:
            self.write_line(source, line)
        return len(text)

    def flush(self) -> None:
        """Flush the raw stream; an incomplete line stays buffered."""
        self._raw.flush()

    def end_line(self) -> None:
        """Write the incomplete line of the output that has no source."""
        self._no_source.end_lines()
        self.flush()

    def write_line(self, source: _OutputSource, line: str) -> None:
        """Write one line of `source`, unless it is blank."""
        if not line.strip():
            return
        line_fields = {"event": _OUTPUT, "line": line.encode(errors="backslashreplace").decode()}
        if source.application:
            line_fields["application"] = source.application
        if source.invocation:
            line_fields["invocation"] = source.invocation
        self._raw.write(json.dumps(line_fields) + "\n")


# --- on the compute node


class _Allowance:
    """A token bucket whose capacity is the amount of one second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._at: float | None = None

    def refill(self, now: float) -> None:
        """Add the amount for the time since the last call."""
        if self._at is not None:
            self._left = min(self._per_s, self._left + (now - self._at) * self._per_s)
            assert self._left <= self._per_s, "unused allowance does not add up"
        self._at = now

    @property
    def is_used_up(self) -> bool:
        """Whether no amount is left."""
        return self._left <= 0

    def take(self, amount: float) -> None:
        """Take an amount. If it exceeds the amount that is left, the balance becomes negative."""
        self._left -= amount


class OutputLines:
    """Logs the standard output and error of one worker.

    Args:
        logger: a logger that is bound to the worker.
        lines_per_s_max: largest number of lines that are logged in a second.
        bytes_per_s_max: largest number of bytes of lines that are logged in a second.
    """

    def __init__(
        self,
        logger: structlog.typing.FilteringBoundLogger,
        *,
        lines_per_s_max: int,
        bytes_per_s_max: int,
    ) -> None:
        self._logger = logger
        self._lines = _Allowance(lines_per_s_max)
        self._bytes = _Allowance(bytes_per_s_max)
        self._rest = b""
        self._skips_line = False
        self._lines_dropped = 0
        self._bytes_dropped = 0

    @property
    def has_dropped(self) -> bool:
        """Whether lines were dropped since `log_dropped` last logged their number."""
        return self._bytes_dropped > 0

    def received(self, chunk: bytes, now: float) -> None:
        """Log the lines in received bytes, and drop the lines beyond the limits.

        Args:
            chunk: any bytes.
            now: seconds of a monotonic clock.
        """
        self._lines.refill(now)
        self._bytes.refill(now)
        if self._is_over():
            self._drop(self._rest + chunk)
            return
        if self._skips_line:
            _, newline, chunk = chunk.partition(b"\n")
            if not newline:
                return
            self._skips_line = False
        *lines, rest = (self._rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        for n, line in enumerate(lines):
            if self._is_over():
                self._drop(b"\n".join([*lines[n:], rest]))
                return
            self._log(line)

    def log_dropped(self) -> None:
        """If lines were dropped since the last call, log their number and bytes."""
        if self.has_dropped:
            lines, self._lines_dropped = self._lines_dropped, 0
            size, self._bytes_dropped = self._bytes_dropped, 0
            self._logger.warning("worker output dropped", lines=lines, bytes=size)

    def ended(self) -> None:
        """Log the incomplete line at the end of the output."""
        self._log(self._rest)
        self.log_dropped()

    def _is_over(self) -> bool:
        return self._lines.is_used_up or self._bytes.is_used_up

    def _drop(self, data: bytes) -> None:
        """Drop `data`, and the rest of its last line."""
        self._rest = b""
        self._skips_line = not data.endswith(b"\n")
        self._lines_dropped += data.count(b"\n") + self._skips_line
        self._bytes_dropped += len(data)

    def _log(self, line: bytes) -> None:
        if not line.strip():
            return
        self._lines.take(1)
        self._bytes.take(len(line))
        fields = _event(line)
        if fields is not None:
            event, level = str(fields.pop("event")), str(fields.pop("level", "info"))
            kept = {name: value for name, value in fields.items() if name not in _RESERVED}
            try:
                with limited_elsewhere():
                    self._logger.log(_LEVELS.get(level, logging.INFO), event, **kept)
            except (TypeError, ValueError, RecursionError):  # the fields cannot be logged
                pass
            else:
                return
        with limited_elsewhere():
            self._logger.info(_OUTPUT, line=line[:LINE_BYTES_MAX].decode(errors="backslashreplace"))


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line that is a JSON object with the field `event`, as written in the
    worker; None for any other line.
    """
    if not line.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return fields if "event" in fields else None
