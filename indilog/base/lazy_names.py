"""Imports public names of a package when they are first used (PEP 562).

Each process of a platform imports `indilog` first. Importing the modules that only clients and
applications need (pydantic, websockets) would take a quarter of a node's start time. So the
packages `indilog` and `indilog.sdk` use this module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package.

    Args:
        package: name of the package (its `__name__`).
        modules: the names that each module provides, by the module's full name.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def provide(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return provide
