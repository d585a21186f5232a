"""The token of a data directory; its holder has full access to the platform.

The token is 256 random bits as text, created at the first start in the file `token` of mode 0600.
All compute nodes of a platform share the token. On several machines it comes with the keys of the
nodes (`indilog.runtime.cluster.cluster_keys`). The token gives no more access than the file system:
a process that can read the file can also read the records in the same directory. Gateways
(`assembly`) accept calls with this token.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

from indilog.base.errors import ConfigError
from indilog.runtime.cluster.data_directory import directory_usable

TOKEN_FILE: Final = "token"  # noqa: S105 - its name
_BYTES: Final = 32
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43,128}")
_READ_CHARACTERS_MAX: Final = 1024


def token_in(directory: Path) -> str:
    """Return the token of a data directory. The first call creates the token durably.

    Processes that start at the same time get the same token.

    Raises:
        DataDirectoryError: the directory cannot be used.
        ConfigError: other users can read the file, or it holds no token.
    """
    file = directory / TOKEN_FILE
    with directory_usable(directory):
        if not file.exists():
            _make(file)
        with file.open() as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(_READ_CHARACTERS_MAX).strip()
    if mode & 0o077:
        raise ConfigError(
            f"Other users can read the token in {file} (mode {mode:o}); remove the file, and the "
            "next start makes another one."
        )
    if not _TOKEN.fullmatch(text):
        raise ConfigError(f"{file} holds no token; remove it, and the next start makes one.")
    return text


def new_token() -> str:
    """Return a new token and an end of line, the content of a token file."""
    return secrets.token_urlsafe(_BYTES) + "\n"


def _make(file: Path) -> None:
    """Write a new token, unless another process does so at the same time."""
    descriptor, name = tempfile.mkstemp(prefix=f"{TOKEN_FILE}-new-", dir=file.parent)  # mode 0600
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(new_token())
            opened.flush()
            os.fsync(opened.fileno())
        try:
            file.hardlink_to(new)  # atomic, and never replaces an existing file
        except FileExistsError:
            return
    finally:
        new.unlink()
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
