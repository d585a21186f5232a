"""The fork server of workers: forks the workers of a compute node (docs/decisions/0069).

`WorkerStarter` executes it with the environment of a worker. The descriptors of a request are the
worker's link, the memory of its claims, its standard input, and its standard output and error.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from indilog.runtime.forking.fork_server import Request, Run, command_of, serve_forks, show_command

WORKER_PROGRAM: Final = (sys.executable, "-P", "-m", "indilog_compute.workers")
"""The beginning of a worker's command, executed or forked."""
_MODULE: Final = "indilog_compute.workers.starting.fork_server"


def command(descriptor: int) -> list[str]:
    """Return the command of a fork server with this socket to its starter."""
    return command_of(_MODULE, descriptor, "-P")


def _load() -> Run:
    from indilog.base.slim_imports import import_structlog

    import_structlog()
    from indilog_compute.workers.starting.worker_process import main as worker_main

    def run(request: Request) -> None:
        link, claims, given, output = request.descriptors
        for descriptor, standard in ((given, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        os.close(given)
        os.close(output)
        own = ("--fd", str(link), "--claims-fd", str(claims))
        show_command([*request.command, *own])
        sys.argv[:] = [*request.command[3:], *own]
        worker_main()

    return run


if __name__ == "__main__":
    serve_forks(_MODULE, _load)
