"""What functions print, as lines of the platform's log: the worker's side and the node's side.

In the worker, `FunctionOutput` takes the place of standard output and standard error. It writes
each line as one JSON object that names the application and the invocation. Bytes that reach the
pipe in another way (C code, child processes) arrive as they are.

On the compute node, `OutputLines` reads the pipe. It logs at most so many lines and bytes a second,
drops and counts what is above, and takes any bytes: a worker never waits for its output to be read.
"""

from __future__ import annotations

import io
import json
import logging
from contextvars import ContextVar
from typing import Any, Final, TextIO

import msgspec
import structlog
from structlog.typing import EventDict

from indilog.base.log_repeats import limited_elsewhere

LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is logged in pieces."""
_OUTPUT: Final = "worker output"
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""What is none of these is logged as information."""
_RESERVED: Final = frozenset(
    {"event", "exc_info", "level", "pid", "self", "stack_info", "timestamp", "worker"}
)
"""Fields of a log line that only the platform sets, and names that its logger takes itself."""


# --- in the worker


class _Speaker:
    """What prints: an application, in one invocation; and the lines that it has begun."""

    __slots__ = ("application", "invocation", "rests")

    def __init__(self, application: str, invocation: str) -> None:
        self.application = application
        self.invocation = invocation
        self.rests: dict[FunctionOutput, str] = {}

    def end_lines(self) -> None:
        """Write the lines that were begun."""
        rests, self.rests = self.rests, {}
        for output, rest in rests.items():
            output.write_line(self, rest)


_SPEAKER: ContextVar[_Speaker | None] = ContextVar("speaker", default=None)


class output_of:  # noqa: N801 - used as a function is
    """Attribute what is printed and logged in this context to an application and an invocation.

    Tasks and threads that are started within, with this context, are attributed as well.

    Args:
        application: its name.
        invocation: its id; empty: what is printed belongs to none.
    """

    __slots__ = ("_speaker", "_token")

    def __init__(self, application: str, invocation: str = "") -> None:
        self._speaker = _Speaker(application, invocation)

    def __enter__(self) -> None:
        """Begin."""
        self._token = _SPEAKER.set(self._speaker)

    def __exit__(self, *_: object) -> None:
        """End, with the line that was begun."""
        _SPEAKER.reset(self._token)
        if self._speaker.rests:
            self._speaker.end_lines()


def attributed(_logger: object, _method: str, fields: EventDict) -> EventDict:
    """Add the application and the invocation to a log line: a processor of structlog."""
    speaker = _SPEAKER.get()
    if speaker is not None:
        fields.setdefault("application", speaker.application)
        if speaker.invocation:
            fields.setdefault("invocation", speaker.invocation)
    return fields


class FunctionOutput(io.TextIOBase):
    """Standard output or error of a worker: a text stream that writes whole lines, attributed.

    Args:
        raw: the stream that it takes the place of.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._no_speaker = _Speaker("", "")

    @property
    def buffer(self) -> Any:  # noqa: ANN401 - as of any text stream
        """The bytes below; what is written there is not attributed."""
        return self._raw.buffer

    def writable(self) -> bool:
        """Tell that text can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor below."""
        return self._raw.fileno()

    def write(self, text: str) -> int:
        """Write text; a line goes out when it is ended, or longer than `LINE_BYTES_MAX`."""
        speaker = _SPEAKER.get() or self._no_speaker
        *lines, rest = (speaker.rests.pop(self, "") + text).split("\n")
        if len(rest) > LINE_BYTES_MAX:
            lines.append(rest)
        elif rest:
            speaker.rests[self] = rest
        for line in lines:
            self.write_line(speaker, line)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered below; a line that is not ended waits for its end."""
        self._raw.flush()

    def end_line(self) -> None:
        """Write the line that was begun outside of any call."""
        self._no_speaker.end_lines()
        self.flush()

    def write_line(self, speaker: _Speaker, line: str) -> None:
        """Write one line as what `speaker` printed; a blank one is left out."""
        if not line.strip():
            return
        told = {"event": _OUTPUT, "line": line.encode(errors="backslashreplace").decode()}
        if speaker.application:
            told["application"] = speaker.application
        if speaker.invocation:
            told["invocation"] = speaker.invocation
        self._raw.write(json.dumps(told) + "\n")


# --- on the compute node


class _Allowance:
    """A token bucket: so much a second, at most a second's worth at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._at: float | None = None

    def refill(self, now: float) -> None:
        """Add what the time since the last call gives."""
        if self._at is not None:
            self._left = min(self._per_s, self._left + (now - self._at) * self._per_s)
        self._at = now

    @property
    def is_used_up(self) -> bool:
        """Whether nothing may be taken now."""
        return self._left <= 0

    def take(self, amount: float) -> None:
        """Take some; the last one may take more than is left."""
        self._left -= amount


class OutputLines:
    """Logs what one worker writes to its standard output and error.

    Args:
        logger: bound to the worker.
        lines_per_s_max: lines logged in a second, at most.
        bytes_per_s_max: bytes of lines logged in a second, at most.
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
        """Whether lines were dropped since the last line that counted them."""
        return self._bytes_dropped > 0

    def received(self, chunk: bytes, now: float) -> None:
        """Log the lines in what arrived, and drop those beyond the limits.

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

    def tell_dropped(self) -> None:
        """Log how much was dropped since this was called last, if anything was."""
        if self.has_dropped:
            lines, self._lines_dropped = self._lines_dropped, 0
            size, self._bytes_dropped = self._bytes_dropped, 0
            self._logger.warning("worker output dropped", lines=lines, bytes=size)

    def ended(self) -> None:
        """Nothing more comes: log what is left."""
        self._log(self._rest)
        self.tell_dropped()

    def _is_over(self) -> bool:
        return self._lines.is_used_up or self._bytes.is_used_up

    def _drop(self, data: bytes) -> None:
        """Drop `data`, and the rest of the line that it ends in."""
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
            except (TypeError, ValueError, RecursionError):  # a form that cannot be logged again
                pass
            else:
                return
        with limited_elsewhere():
            self._logger.info(_OUTPUT, line=line[:LINE_BYTES_MAX].decode(errors="backslashreplace"))


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line that a logger in the worker wrote; None: it is another line."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return fields if "event" in fields else None
