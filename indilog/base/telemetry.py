"""Configures the structured logs (structlog) of a process.

Nothing is configured at import. A process calls `configure_logging` once, at its start; modules get
their logger from `structlog.get_logger`. Lines pass `Repeats` and go to a `LogStream`.
"""

from __future__ import annotations

import logging
import sys
import time  # noqa: TID251 - clock of the process's log
from collections.abc import Callable, Sequence
from typing import Final, Literal, TextIO, TypeAlias, cast

import structlog

from indilog.base.errors import ConfigError
from indilog.base.log_repeats import Repeats
from indilog.base.log_stream import LogStream

LogFormat: TypeAlias = Literal["json", "console"]
_LEVELS: Final = ("debug", "info", "warning", "error")

_LOGS_EACH_REQUEST: Final = ("httpx", "botocore.credentials", "urllib3")
"""Loggers of client libraries that write a line for each request at the level `info`."""


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
    event. A reader of the stream that stops reading does not block this process.

    Lines of the standard library's loggers (such as uvicorn's) have the same form. May be called
    again; the last call takes effect. `processors` are applied to each line first. If
    `counts_repeats` is set, repeated lines are limited (`indilog.base.log_repeats`) by the time of
    `clock`. If it is not set, the reader must be another process of the platform. That process
    limits repeated lines and never stops reading, so each line is written directly.

    Raises:
        ConfigError: the level is unknown.
    """
    if level not in _LEVELS:
        raise ConfigError(f"The log level must be one of {', '.join(_LEVELS)}, not {level!r}.")
    stream = cast("TextIO", LogStream(stream or sys.stderr, waits=not counts_repeats))
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
    program's standard output. A standard error that nothing reads does not block the program.
    """
    if not structlog.is_configured():
        stream = cast("TextIO", LogStream(sys.stderr))
        structlog.configure(
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                Repeats(_tell),
                *_rendering("console", stream),
            ],
            wrapper_class=structlog.make_filtering_bound_logger("warning"),
            logger_factory=structlog.WriteLoggerFactory(stream),
        )


def _rendering(log_format: LogFormat, stream: TextIO) -> list[structlog.typing.Processor]:
    if log_format == "console":
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
