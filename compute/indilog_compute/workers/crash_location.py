"""The line of deployed code at which a worker process crashed.

In the worker, a fatal signal writes the stack to a file. During an import, a call of `os._exit`
also writes the stack. The compute node reads the line of deployed code from this file. After any
other exit the file is empty, so no line is reported. `starting.worker_process` uses
`CrashLocation`; `process` calls `read_crash_location`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from indilog_compute.workers.loader import PACKAGE

_FILE: Final = "crash_location"
_BYTES_MAX: Final = 64 * 1024
_FRAME: Final = re.compile(rf'File ".*?/{PACKAGE}\d+/(.+?)", line (\d+)')


class CrashLocation:
    """The worker's side: lets fatal signals write the stack, without a core dump."""

    def __init__(self, directory: Path) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._file: TextIO = (directory / _FILE).open("w")
        faulthandler.enable(self._file)

    @contextlib.contextmanager
    def note_exits(self) -> Iterator[None]:
        """Return a context in which `os._exit` writes the stack before it ends the process."""
        really_exit = os._exit

        def noted_exit(status: int) -> None:
            faulthandler.dump_traceback(self._file, all_threads=False)
            really_exit(status)

        os._exit = noted_exit  # type: ignore[assignment]
        try:
            yield
        finally:
            os._exit = really_exit


def read_crash_location(directory: Path) -> str | None:
    """Return the line at which the worker with this directory crashed, such as `social.py, line
    12`; None if the worker wrote no stack, or no line of deployed code is in it.
    """
    try:
        with (directory / _FILE).open(errors="replace") as file:
            text = file.read(_BYTES_MAX)
    except OSError:
        return None
    found = _FRAME.search(text)
    return f"{found[1]}, line {found[2]}" if found else None
