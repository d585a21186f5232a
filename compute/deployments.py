"""What is deployed, as records of the reserved log `$apps`: so it survives a restart, and reaches
other nodes.

Each deployment is one record tagged with the application's name; the newest record of a name wins.
The sources are in the record, so a node needs nothing but the log.
"""

from __future__ import annotations

from typing import Final

import msgspec
import structlog

from indilog.deployed import FunctionSpec
from indilog.errors import DeployError, InvalidTagError, TooLargeError
from indilog.log import Log, LogSource, Session

APPS_LOG: Final = "$apps"
RESERVED: Final = "$"
"""First character of the names of the platform's own logs."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of an application, as it stands in the log."""

    name: str
    version: int
    owner: str
    sources: dict[str, str]
    functions: tuple[FunctionSpec, ...]


def check_log_name(name: str) -> str:
    """Return `name` if a user may read and write that log.

    Raises:
        InvalidTagError: it is one of the platform's own.
    """
    if name.startswith(RESERVED):
        raise InvalidTagError(
            f"Names of logs that start with {RESERVED} are the platform's own; choose another "
            f"name than {name!r}."
        )
    return name


class DeploymentLog:
    """The deployments in a log source."""

    def __init__(self, logs: LogSource) -> None:
        self._log: Log = logs.log(APPS_LOG, Session())

    async def append(self, deployment: Deployment) -> None:
        """Record a deployment; when this returns it survives a crash.

        Raises:
            DeployError: its sources exceed the limit of a record.
        """
        data = msgspec.json.encode(deployment)
        try:
            await self._log.append(data, tags=[deployment.name])
        except TooLargeError as error:
            raise DeployError(
                f"The sources of {deployment.name} are {error.size:,} bytes, the limit is "
                f"{error.limit:,}; leave data files out."
            ) from error

    async def newest(self) -> dict[str, Deployment]:
        """Return the newest deployment of each application, by name."""
        found: dict[str, Deployment] = {}
        bound = 0
        while page := await self._log.read_range(bound=bound):
            for record in page:
                try:
                    deployment = msgspec.json.decode(record.data, type=Deployment)
                except msgspec.DecodeError as error:
                    structlog.get_logger().error(
                        "deployment not understood", seqnum=record.seqnum, reason=str(error)
                    )
                    continue
                found[deployment.name] = deployment
            bound = page[-1].seqnum + 1
        return found
