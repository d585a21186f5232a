"""The Unix socket beside the port: the same gateway for programs of the same user, which need no
token there.

Its folder has mode 0700, so no other user can connect; a browser cannot at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from indilog.base.errors import DataDirectoryError

SOCKET_FOLDER: Final = "socket"
SOCKET_FILE: Final = "gateway"


def socket_in(directory: Path) -> Path:
    """Return the place of the socket of a compute node with this data directory."""
    return directory / SOCKET_FOLDER / SOCKET_FILE


class UnixSocket:
    """The place of a Unix socket, in a folder that is ours alone.

    Attributes:
        address: what to bind: a short name of the file, whose path may exceed the 107 bytes that
            the kernel takes.

    Raises:
        DataDirectoryError: the folder cannot be made.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.parent.chmod(0o700)
            file.unlink(missing_ok=True)  # of a process that was killed
            self._folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DataDirectoryError(
                f"The folder {file.parent} for the gateway's socket cannot be used: "
                f"{error.strerror}; remove what is in its place."
            ) from error
        self.address = f"/proc/self/fd/{self._folder}/{file.name}"

    def remove(self) -> None:
        """Remove the socket."""
        self._file.unlink(missing_ok=True)
        os.close(self._folder)
