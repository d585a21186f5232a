"""A process imports only what it needs of the public API."""

from __future__ import annotations

import subprocess
import sys

import pytest

import indilog
from indilog import sdk

CLIENTS_ONLY = {"fastapi", "httpx", "pydantic", "typer", "websockets"}


def test_a_node_does_not_import_what_only_clients_and_applications_need() -> None:
    program = "import sys, indilog.node; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "indilog_storage" in done.stdout.split()
    assert not CLIENTS_ONLY & set(done.stdout.split())


@pytest.mark.parametrize("package", [indilog, sdk])
def test_every_public_name_is_there(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018
