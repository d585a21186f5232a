"""The files in `deploy/`: accepted by their linters, and their commands start a platform."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import httpx
import pytest
import trustme

from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys
from tests.cluster.machine import machine
from tests.cluster.platform_process import platform
from tests.support.repeated import repeated
from tests.support.zookeeper_server import ZooKeeperServer

DEPLOY: Final = Path(__file__).resolve().parents[3] / "deploy"
TOOLS: Final = Path(sys.executable).parent


def accepted(*command: str | Path) -> None:
    done = subprocess.run([*command], capture_output=True, text=True, check=False, timeout=250)
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


@pytest.mark.parametrize("name", ["indilog.service", "indilog-node.service"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    if (tool := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not there; Debian's package systemd has it")
    unit = (DEPLOY / name).read_text()
    assert "ExecStart=/usr/local/bin/indilog " in unit
    there = tmp_path / name
    there.write_text(unit.replace("/usr/local/bin/indilog", "/bin/true"))
    done = subprocess.run([tool, "verify", there], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, "it has no warning about the unit"


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


def make_certificate(directory: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert")
    certificate.private_key_pem.write_to_path(directory / "key")
    authority.cert_pem.write_to_path(directory / "ca")


@pytest.mark.cluster
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(unit_command(), id="unit"),
        repeated(entrypoint(), "container"),
        repeated([*entrypoint(), *pod_arguments()], "pod"),
    ],
)
def test_the_command_starts_a_platform(command: list[str], tmp_path: Path) -> None:
    """With its own directory, port and certificate, as a mount would give them."""
    make_certificate(tmp_path)
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
        assert httpx.get(url.join("/livez"), verify=context, timeout=60).status_code == 200


@pytest.mark.cluster
@pytest.mark.zookeeper
def test_the_pods_of_the_cluster_find_each_other(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    """With their own directory, ports and secrets, as mounts would give them."""
    manifest = (DEPLOY / "kubernetes" / "cluster.yaml").read_text()
    assert 'command: ["indilog", "node", "--config", "/etc/indilog/cluster.toml"]' in manifest
    found = re.search(r"cluster\.toml: \|\n(.*?)^---", manifest, re.MULTILINE | re.DOTALL)
    assert found is not None
    make_certificate(tmp_path)
    make_authority(tmp_path / "keys")
    there = {
        "/run/keys": make_node_keys(tmp_path / "keys", "all"),
        "/run/tls/tls.crt": tmp_path / "cert",
        "/run/tls/tls.key": tmp_path / "key",
    }
    configuration = textwrap.dedent(found[1])
    for mounted, path in there.items():
        assert f'"{mounted}"' in configuration
        configuration = configuration.replace(f'"{mounted}"', f'"{path}"')
    pods = [machine(tmp_path, n, zookeeper, {"host": "127.0.0.1"}) for n in range(3)]
    try:
        for pod in pods:
            pod.config.write_text(configuration)
            pod.start()
        for pod in pods:
            pod.wait_ready()
        assert {pod.name for pod in pods} == {"node-0", "node-1", "node-2"}
        context = ssl.create_default_context(cafile=tmp_path / "ca")
        probed = re.search(r"httpGet:\n +path: (\S+)", manifest)
        assert probed is not None
        header = re.search(r"- name: Host\n +value: (\S+)", manifest)
        assert header is not None
        for pod in pods:
            url = httpx.URL(pod.url).copy_with(host="127.0.0.1", path=probed[1])
            answer = httpx.get(url, headers={"Host": header[1]}, verify=context, timeout=60)
            assert answer.status_code == 200
    finally:
        for pod in pods:
            pod.kill()
