"""Process-wide state: a test that changes it would affect later tests."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
_FILES = resource.RLIMIT_NOFILE


class ProcessState(NamedTuple):
    """What there was before a test.

    A command of the platform sets handlers of signals, the limit of open files, hooks and loggers
    for its process; these are restored. A test restores whatever else it changes.
    """

    signals: dict[signal.Signals, Any]
    excepthook: Callable[..., object]
    handlers: list[logging.Handler]
    level: int
    files: tuple[int, int]
    own: dict[str, object]

    def restore(self) -> list[str]:
        """Put back what commands set; return what a test should have put back."""
        structlog.reset_defaults()
        sys.excepthook = self.excepthook
        root = logging.getLogger()
        root.handlers[:] = self.handlers
        root.setLevel(self.level)
        for number, handler in self.signals.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        if resource.getrlimit(_FILES) != self.files:
            resource.setrlimit(_FILES, self.files)
        now = _own()
        return [name for name, value in self.own.items() if now[name] != value]


def process_state() -> ProcessState:
    """Return what there is now."""
    root = logging.getLogger()
    return ProcessState(
        {number: signal.getsignal(number) for number in _SIGNALS},
        sys.excepthook,
        list(root.handlers),
        root.level,
        resource.getrlimit(_FILES),
        _own(),
    )


def _own() -> dict[str, object]:
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST", None)
    return {
        "the working directory": os.getcwd(),  # noqa: PTH109 Path.cwd() is slower, for each test
        "the environment": environment,
        "the path of imports": list(sys.path),
        "the finders of imports": list(sys.meta_path),
        "the policy of event loops": type(asyncio.get_event_loop_policy()),
        "the limit of recursion": sys.getrecursionlimit(),
    }
