"""What callers may know of what is deployed."""

from __future__ import annotations

from typing import Any

import msgspec


class FunctionSpec(msgspec.Struct, frozen=True):
    """What callers may know of a function: its name, its words, its JSON schemas.

    `is_async`: it can be stopped; otherwise it runs in a thread, which cannot.
    """

    name: str
    doc: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    timeout_s: float | None = None
    is_async: bool = True


class AppInfo(msgspec.Struct, frozen=True):
    """One deployed application; `version` counts its deployments from 1."""

    name: str
    version: int
    owner: str
    functions: tuple[FunctionSpec, ...]
