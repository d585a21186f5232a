"""The files in `deploy/`: accepted by their linters, and their commands start a platform."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest
import trustme

from tests.cluster.platform_process import platform

DEPLOY: Final = Path(__file__).resolve().parents[3] / "deploy"
TOOLS: Final = Path(sys.executable).parent


def accepted(*command: str | Path) -> None:
    done = subprocess.run([*command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_accepts_the_dockerfile() -> None:
    accepted(TOOLS / "hadolint", DEPLOY / "Dockerfile")


def test_the_compose_file_has_the_form_of_the_specification() -> None:
    schema = "vendor.compose-spec"
    accepted(TOOLS / "check-jsonschema", "--builtin-schema", schema, DEPLOY / "compose.yaml")


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_kubernetes_knows_every_field_of_the_manifests(version: str) -> None:
    manifests = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    assert manifests
    accepted(TOOLS / "kubernetes-validate", "-k", version, "--strict", *manifests)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if (tool := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not there; Debian's package systemd has it")
    unit = (DEPLOY / "indilog.service").read_text()
    assert "ExecStart=/usr/local/bin/indilog " in unit
    there = tmp_path / "indilog.service"
    there.write_text(unit.replace("/usr/local/bin/indilog", "/bin/true"))
    done = subprocess.run([tool, "verify", there], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "indilog.service" not in done.stderr, "it has no warning about the unit"


def entrypoint() -> list[str]:
    found = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found.group(1))
    return command


def pod_arguments() -> list[str]:
    text = (DEPLOY / "kubernetes" / "indilog.yaml").read_text()
    found = re.search(r"^ +args: (.*)$", text, re.MULTILINE)
    assert found is not None
    arguments: list[str] = json.loads(found.group(1))
    return arguments


def unit_command() -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", (DEPLOY / "indilog.service").read_text(), re.MULTILINE)
    assert found is not None
    return shlex.split(found.group(1))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "command",
    [unit_command(), entrypoint(), [*entrypoint(), *pod_arguments()]],
    ids=["unit", "container", "pod"],
)
def test_the_command_starts_a_platform(command: list[str], tmp_path: Path) -> None:
    """With its own directory, port and certificate, as a mount would give them."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    certificate.private_key_pem.write_to_path(tmp_path / "key")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    files = {
        "/run/secrets/tls_cert": "cert", "/run/secrets/tls_key": "key",
        "/run/tls/tls.crt": "cert", "/run/tls/tls.key": "key",
    }  # fmt: skip
    options = [str(tmp_path / files[o]) if o in files else o for o in command[2:]]
    assert command[1] == "up"
    at = options.index("--data")
    del options[at : at + 2]
    with platform(tmp_path / "data", *options) as running:
        url = httpx.URL(running.url).copy_with(host="127.0.0.1")
        context = ssl.create_default_context(cafile=tmp_path / "ca")
        assert (url.scheme == "https") == ("--tls-cert" in options)
        assert httpx.get(url.join("/livez"), verify=context).status_code == 200
