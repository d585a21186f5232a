"""The gateway's Unix socket, at which programs of the same user need no token.

The folder of the socket has mode 0700, so no other user can connect. Browsers cannot connect to
Unix sockets. `GatewayServer` makes the socket.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from indilog.base.errors import DataDirectoryError

SOCKET_FOLDER: Final = "socket"
SOCKET_FILE: Final = "gateway"


def socket_in(directory: Path) -> Path:
    """Return the path of the Unix socket in a compute node's data directory."""
    return directory / SOCKET_FOLDER / SOCKET_FILE


class UnixSocket:
    """A Unix socket's file, in a folder that only our user can enter.

    Attributes:
        address: the path to bind: a short alias of the file, because a socket address has at most
            107 bytes.

    Raises:
        DataDirectoryError: the folder cannot be created.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.parent.chmod(0o700)
            file.unlink(missing_ok=True)  # left by a process that was killed
            self._folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DataDirectoryError(
                f"The folder {file.parent} for the gateway's socket cannot be used: "
                f"{error.strerror}; remove the file that is in its place."
            ) from error
        self.address = f"/proc/self/fd/{self._folder}/{file.name}"

    def remove(self) -> None:
        """Remove the socket's file."""
        self._file.unlink(missing_ok=True)
        os.close(self._folder)
