"""The fork server of nodes: forks the processes of a cluster on this machine
(docs/decisions/0034).

`NodeStarter` runs it. The first descriptor of a request is the node's socket to its supervisor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from indilog.runtime.forking.fork_server import Request, Run, command_of, serve_forks, show_command

NODE_PROGRAM: Final = (sys.executable, "-m", "indilog.node")
"""The beginning of a node's command, executed or forked."""
_MODULE: Final = "indilog.runtime.cluster.fork_server"
_THREADS_OF_BLAS: Final = "OPENBLAS_NUM_THREADS"


def command(descriptor: int) -> list[str]:
    """Return the command of a fork server with this socket to its starter."""
    return command_of(_MODULE, descriptor)


def _load() -> Run:
    node_main = imported_node_main()

    def run(request: Request) -> None:
        link = ("--supervisor-fd", str(request.descriptors[0]))
        show_command([*request.command, *link])
        sys.argv[:] = [*request.command[2:], *link]
        node_main([*request.command[len(NODE_PROGRAM) :], *link])

    return run


def imported_node_main() -> Callable[[Sequence[str]], None]:
    """Import a node, without the threads that numpy's OpenBLAS starts when it is loaded."""
    given = os.environ.get(_THREADS_OF_BLAS)
    os.environ[_THREADS_OF_BLAS] = "1"
    from indilog.base.slim_imports import import_structlog

    import_structlog()
    from indilog.runtime.cluster.node_process import main as node_main

    if given is None:
        del os.environ[_THREADS_OF_BLAS]
    else:
        os.environ[_THREADS_OF_BLAS] = given
    return node_main


if __name__ == "__main__":
    serve_forks(_MODULE, _load)
