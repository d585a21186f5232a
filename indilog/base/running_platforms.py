"""Registers the platforms that this user runs on this machine, with their addresses and token
files.

A platform writes one file per gateway into `/tmp/indilog-UID`, a directory of mode 0700 that must
belong to this user. The platform holds a lock on the file while the gateway serves. The kernel
frees the lock when the process ends, even by a crash. A file that is not locked is stale: another
service may use the gateway's port now, so the token is not sent to it. The file has the path of the
token's file, but not the token.

A process that changes the directory holds the directory's lock. So no process removes the file of
another process. `assembly` registers a platform's gateways; `indilog.link.access` finds them.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from indilog.base.loopback import is_loopback

_LOCK: Final = ".lock"
_NEW: Final = ".new-"
_ENDING: Final = ".json"
_ENTRIES_MAX: Final = 1_000
"""Largest number of files that a caller reads; one user has far fewer ports."""
_ENTRY_BYTES_MAX: Final = 64 * 1024
_LITERAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}  # noqa: S104
"""The loopback address to reach a gateway that listens on a wildcard or name."""
_PORTS: Final = {"http": 80, "https": 443}


class RunningPlatform(msgspec.Struct, frozen=True, kw_only=True):
    """The registered data of a gateway.

    Attributes:
        url: URL with the literal loopback address on which it listens.
        names: further host names of the gateway.
        token_file: path of the file with its token; empty if it needs none.
        certificate: path of its TLS certificate; empty if it serves plain HTTP.
        socket: path of its Unix socket.
    """

    url: str
    names: tuple[str, ...] = ()
    token_file: str = ""
    certificate: str = ""
    socket: str = ""

    def answers_to(self, url: str) -> bool:
        """Return whether `url` is a URL of this gateway; `check_url` must accept `url`."""
        asked, own = urlsplit(url), urlsplit(self.url)
        return (
            asked.scheme == own.scheme
            and _port(url) == _port(self.url)
            and asked.hostname in (own.hostname, *self.names)
        )


def running_at(
    host: str,
    port: int,
    *,
    names: Iterable[str] = (),
    token_file: Path | None,
    certificate: Path | None,
    socket: Path,
) -> RunningPlatform:
    """Return the entry for callers on this machine of a gateway that listens on `host` and `port`.

    Args:
        host: a name, an address, or the wildcard `0.0.0.0` or `::`.
        port: TCP port.
        names: further host names of the gateway.
        token_file: path of the file with its token; None: it needs no token.
        certificate: path of its TLS certificate; None: it serves plain HTTP.
        socket: path of its Unix socket.
    """
    address = _LITERAL.get(host, host)
    literal = f"[{address}]" if ":" in address else address
    here = ("localhost",) if is_loopback(address) else ()
    return RunningPlatform(
        url=f"{'https' if certificate else 'http'}://{literal}:{port}",
        names=(*here, *names),
        token_file=_absolute(token_file),
        certificate=_absolute(certificate),
        socket=_absolute(socket),
    )


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())


def directory_of_user() -> Path:
    """Return the directory in which the platforms of this user are registered."""
    return Path(f"/tmp/indilog-{os.getuid()}")  # noqa: S108 - checked to be ours alone


def platform_at(url: str, directory: Path | None = None) -> RunningPlatform | None:
    """Return this user's running platform with the gateway at `url`; None if there is none.

    Args:
        url: URL of the gateway.
        directory: directory with the registered platforms; default: `directory_of_user`.
    """
    directory = directory or directory_of_user()
    if not _is_private(directory):
        return None
    names = sorted(name for name in os.listdir(directory) if name.endswith(_ENDING))  # noqa: PTH208
    for name in names[:_ENTRIES_MAX]:
        found = _live(directory / name)
        if found is not None and found.answers_to(url):
            return found
    return None


@contextmanager
def registered(platform: RunningPlatform, directory: Path | None = None) -> Iterator[None]:
    """Register `platform` for callers of this user while the block runs.

    Raises:
        OSError: the directory belongs to another user or cannot be written; callers then need
            `INDILOG_TOKEN`.
    """
    directory = directory or directory_of_user()
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"{directory} is not a directory of mode 0700 of this user.")
    path = directory / f"{urlsplit(platform.url).netloc}{_ENDING}"
    with _locked(directory):
        _remove_stale(directory)
        entry = _write_entry(directory, path, platform)
    try:
        yield
    finally:
        with _locked(directory):
            if path.exists() and os.path.samestat(path.stat(), os.fstat(entry)):
                path.unlink()
        os.close(entry)


def _write_entry(directory: Path, path: Path, platform: RunningPlatform) -> int:
    """Write the entry and return its open descriptor, which holds its lock."""
    new = directory / f"{_NEW}{os.getpid()}"
    entry = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(entry, fcntl.LOCK_EX)
        os.write(entry, msgspec.json.encode(platform))
        new.replace(path)
    except OSError:
        os.close(entry)
        raise
    return entry


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_stale(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != _LOCK and _live(path) is None:
            path.unlink(missing_ok=True)


def _live(path: Path) -> RunningPlatform | None:
    """Return the entry in a file if its platform holds the file's lock; None: the file is stale or
    damaged.
    """
    try:
        entry = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(entry, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return msgspec.json.decode(os.read(entry, _ENTRY_BYTES_MAX), type=RunningPlatform)
        except msgspec.DecodeError:
            return None
    except OSError:
        return None
    finally:
        os.close(entry)
    return None


def _is_private(directory: Path) -> bool:
    """Return whether the path is a directory of this user that no other user can enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_ours and not stat.S_IMODE(found.st_mode) & 0o077


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or _PORTS[parts.scheme]
