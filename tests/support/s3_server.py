"""An S3-compatible server in a process of its own, on loopback, with nothing on disk.

In the process of a test the server would share the interpreter's lock with the client. A client
that waits for an answer while it holds the lock would block the server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyarrow import fs

_STOP_S_MAX = 10.0


class S3Server:
    """A running server with the bucket `logs`; the credentials of clients do not matter."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self._address = f"127.0.0.1:{port}"

    @property
    def place(self) -> str:
        """The value of `cold_place` for this server."""
        return f"s3://logs/prod?endpoint_override={self._address}&scheme=http&region=us-east-1"

    def system(self) -> fs.S3FileSystem:
        """Return a client of its own."""
        return fs.S3FileSystem(
            endpoint_override=self._address,
            scheme="http",
            region="us-east-1",
            access_key="key",
            secret_key="secret",
            allow_bucket_creation=True,
        )

    def objects(self) -> list[str]:
        """Return the paths of all Parquet files."""
        selector = fs.FileSelector("logs/prod", recursive=True, allow_not_found=True)
        found = self.system().get_file_info(selector)
        return [info.path for info in found if info.path.endswith(".parquet")]

    def stop(self) -> None:
        """End the server; all its objects are lost."""
        self._process.kill()
        self._process.wait(_STOP_S_MAX)


CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What the environment of the server's clients has; the server accepts any credentials."""


@contextmanager
def credentials_set() -> Iterator[None]:
    """Set the clients' credentials in the environment of this process."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def s3_running() -> Iterator[S3Server]:
    """Run a server on a port that it chooses itself."""
    command = [sys.executable, "-m", "tests.support.s3_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        server = S3Server(process, int(line))
        try:
            server.system().create_dir("logs")
            yield server
        finally:
            server.stop()


def _serve() -> None:
    """Serve until the parent, which has the other end of the standard input, is gone."""
    from moto.server import ThreadedMotoServer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    started = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    started.start()
    _, port = started.get_host_and_port()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    ended = threading.Thread(target=sys.stdin.read)
    ended.start()
    ended.join()
    started.stop()


if __name__ == "__main__":
    _serve()
