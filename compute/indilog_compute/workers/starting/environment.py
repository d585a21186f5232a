"""Selects the environment variables that deployed code gets: the variables that a process needs,
and the variables that the setting `worker_environment` names. Other variables are omitted, because
they may contain secrets of the user that started the platform. `process` calls
`environment_of_worker`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from typing import Final

_NEEDED: Final = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
    }
)
_NEEDED_BEGINNING: Final = "LC_"


def environment_of_worker(
    passed: Collection[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a worker process.

    Args:
        passed: names of further variables to pass (`worker_environment`).
        environment: environment variables of the compute node.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name in _NEEDED or name.startswith(_NEEDED_BEGINNING) or name in passed
    }
    found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    found["PYTHONUNBUFFERED"] = "1"
    return found
