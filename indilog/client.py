"""`indilog.open` runs the platform inside a program, and returns a `Client`.

`indilog.connect` returns the same interface to a running platform, over a socket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from indilog.base.log import Log, LogSource, Session, check_log_name
from indilog.base.telemetry import quiet_unless_configured
from indilog.config import Config


class Client:
    """A session of a program with the platform, which gives access to logs."""

    def __init__(self, logs: LogSource) -> None:
        self._logs = logs
        self.session = Session()

    def log(self, name: str) -> Log:
        """Return the log `name`, which need not exist before. All logs of a client share its
        session.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return self._logs.log(check_log_name(name), self.session)


@asynccontextmanager
async def open(  # noqa: A001 indilog.open reads as it is meant
    path: str | Path, config: Config | None = None
) -> AsyncIterator[Client]:
    """Run the platform inside this process, with its data in the directory `path`.

    The directory is created if it is missing; a later call with the same path continues with its
    data. Only one process at a time may open it. All acknowledged records survive a crash of this
    process.

    Raises:
        DataDirectoryError: the directory is in use, of a newer format, or damaged.
        ConfigError: the directory was created with a layout that differs from `config`.
    """
    from indilog.runtime.cluster.assembly import embedded

    quiet_unless_configured()
    config = config or Config()
    config = dataclasses.replace(config, node=dataclasses.replace(config.node, data_dir=Path(path)))
    async with embedded(config) as platform:
        yield Client(platform.logs)
