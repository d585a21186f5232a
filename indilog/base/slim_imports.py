"""Imports libraries without their optional dependencies, which would slow the start of a process.

The main function of a process of the platform calls these functions before other modules import the
library. A program that uses IndiLog as a library imports the libraries as they are.
"""

from __future__ import annotations

import importlib
import sys


def import_structlog() -> None:
    """Import structlog without rich, which takes half of a worker's start. So structlog formats
    exceptions on a terminal as plain tracebacks.
    """
    _import_without("structlog", "rich")


def import_httpx() -> None:
    """Import httpx without click and trio. Only the command line of httpx needs click."""
    _import_without("httpx", "click")
    _import_without("httpcore", "trio")  # httpx imports it with the first client


def _import_without(library: str, *hidden: str) -> None:
    """Import `library` while imports of the `hidden` packages fail. A package that has already been
    imported is not hidden.
    """
    absent = [name for name in hidden if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment] # its import raises ImportError now
    try:
        importlib.import_module(library)
    finally:
        for name in absent:
            del sys.modules[name]
