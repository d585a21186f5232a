"""A process imports only the modules of the public API that it uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

import indilog
from indilog import sdk

CLIENTS_ONLY = {"fastapi", "httpx", "pydantic", "typer", "websockets"}


def imported_with(*modules: str) -> set[str]:
    """Return which packages a new process has after it has imported these modules."""
    program = f"import sys, {', '.join(modules)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_node_does_not_import_packages_of_clients_and_applications() -> None:
    imported = imported_with("indilog.node")
    assert "indilog_storage" in imported
    assert not CLIENTS_ONLY & imported


def test_a_supervisor_and_commands_do_not_import_packages_of_nodes_and_applications() -> None:
    imported = imported_with("indilog.cli.commands", "indilog.runtime.cluster.supervisor")
    assert {"typer", "msgspec"} <= imported
    assert not {"fastapi", "httpx", "indilog_storage", "numpy", "pydantic", "uvicorn"} & imported


@pytest.mark.parametrize("package", [indilog, sdk])
def test_every_public_name_is_there(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018
