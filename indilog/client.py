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
    """One session of one program with the platform; gives out logs."""

    def __init__(self, logs: LogSource) -> None:
        self._logs = logs
        self.session = Session()

    def log(self, name: str) -> Log:
        """Return the log `name`; it need not exist before. All logs of a client share its session.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return self._logs.log(check_log_name(name), self.session)


@asynccontextmanager
async def open(  # noqa: A001 indilog.open reads as it is meant
    path: str | Path, config: Config | None = None
) -> AsyncIterator[Client]:
    """Run the platform inside this process, with its data in the directory `path`.

    The directory is made if it is missing, and found again at the next call. One process at a time
    may have it open. Everything acknowledged survives a crash of this process.

    Raises:
        DataDirectoryError: the directory is in use, of a newer format, or damaged.
        ConfigError: the directory was created with another layout than `config` asks for.
    """
    from indilog.runtime.cluster.assembly import embedded

    quiet_unless_configured()
    config = config or Config()
    config = dataclasses.replace(config, node=dataclasses.replace(config.node, data_dir=Path(path)))
    async with embedded(config) as platform:
        yield Client(platform.logs)
