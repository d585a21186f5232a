"""A process imports only the modules of the public API that it uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

import indilog
from indilog import sdk

NODES_ONLY = {"indilog_ordering", "indilog_storage", "indilog_index", "numpy", "zmq"}
GATEWAYS_ONLY = {"fastapi", "grpc", "prometheus_client", "starlette", "uvicorn"}
CLIENTS_ONLY = {"httpx", "typer", "websockets"}


def imported_by(start: str) -> set[str]:
    """Return which packages a new process has after it has executed `start`, also if that exits."""
    program = f"""
import sys
try:
    {start}
except SystemExit:
    pass
print(*{{name.split(".")[0] for name, module in sys.modules.items() if module}}, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def imported_with(module: str, *arguments: str) -> set[str]:
    """Return which packages the process `python -m MODULE ARGUMENTS` has when it ends."""
    given = ["", *arguments]
    return imported_by(
        f"import runpy; sys.argv = {given}; runpy.run_module({module!r}, {{}}, '__main__')"
    )


def test_a_node_imports_no_packages_of_gateways_clients_and_applications() -> None:
    imported = imported_with("indilog.node", "--help")
    assert {"indilog_storage", "numpy", "structlog"} <= imported
    assert not {*GATEWAYS_ONLY, *CLIENTS_ONLY, "pydantic", "rich"} & imported


def test_a_worker_imports_no_packages_of_nodes_gateways_and_clients() -> None:
    imported = imported_with("indilog_compute.workers", "--help")
    assert {"msgspec", "pydantic", "structlog"} <= imported
    assert not {*NODES_ONLY, *GATEWAYS_ONLY, *CLIENTS_ONLY, "rich"} & imported


def test_a_command_imports_only_what_it_needs() -> None:
    others = {*NODES_ONLY, *GATEWAYS_ONLY, "crc32c", "structlog"}
    asked = imported_with("indilog", "--version")
    assert "typer" in asked
    assert not {*others, "asyncio", "httpx", "pydantic", "rich"} & asked
    helped = imported_with("indilog", "--help")
    assert not {*others, "asyncio", "httpx", "pydantic"} & helped
    called = imported_with("indilog", "invoke", "demo.count", "--url", "http://127.0.0.1:1")
    assert "httpx" in called
    assert not {*others, "click", "rich", "trio"} & called


def test_a_supervisor_imports_no_packages_of_nodes_and_applications() -> None:
    imported = imported_by("import indilog.cli.commands, indilog.runtime.cluster.supervisor")
    assert {"typer", "msgspec"} <= imported
    assert not {*NODES_ONLY, *GATEWAYS_ONLY, "httpx", "pydantic"} & imported


def test_the_public_interface_costs_no_imports_until_it_is_used() -> None:
    assert not {"asyncio", "msgspec", "structlog", "xxhash"} & imported_by("import indilog")


def test_a_program_that_uses_the_library_keeps_the_tracebacks_of_rich() -> None:
    assert "rich" in imported_by("import indilog.client")


@pytest.mark.parametrize("package", [indilog, sdk])
def test_every_public_name_is_there(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018
