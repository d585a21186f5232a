"""How a program finds a platform and its token, which is sent to that platform alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from indilog.base import running_platforms
from indilog.base.errors import ConfigError
from indilog.base.running_platforms import platform_at, registered, running_at
from indilog.link.access import reach

TOKEN = "a-token"
URL = "http://127.0.0.1:7001"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which this test registers platforms."""
    path = tmp_path / "running"
    monkeypatch.setattr(running_platforms, "directory_of_user", lambda: path)
    return path


@pytest.fixture
def up(directory: Path, tmp_path: Path) -> Iterator[Path]:
    """Register a platform at `URL`; yield its token file."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    found = running_at(
        "127.0.0.1", 7001, token_file=file, certificate=None, socket=tmp_path / "socket"
    )
    with registered(found):
        yield file


def token(url: str, **environment: str) -> str:
    return reach(url, environment=environment).token


@pytest.mark.usefixtures("up")
def test_a_platform_of_this_machine_is_found_by_its_own_url_only() -> None:
    assert token(URL) == TOKEN
    for other in (
        "http://127.0.0.1:7002",
        "http://127.0.0.2:7001",  # another user may listen there
        "http://[::1]:7001",
        "https://127.0.0.1:7001",
        "http://localhost:7002",
        "http://evil.example:7001",
        "http://127.0.0.1.evil.example:7001",
        "http://127.0.0.1@evil.example:7001",
        "http://evil.example/http://127.0.0.1:7001",
    ):
        assert token(other) == "", other


@pytest.mark.usefixtures("up")
def test_localhost_becomes_the_address_that_the_platform_listens_on() -> None:
    """Otherwise `localhost` could lead to another user's process on the same port of `::1`."""
    found = reach("http://localhost:7001/", environment={})
    assert (found.url, found.token) == (URL, TOKEN)
    assert found.headers == {"authorization": f"Bearer {TOKEN}"}
    assert TOKEN not in repr(found)


@pytest.mark.usefixtures("directory")
def test_the_environments_token_belongs_to_the_environments_url() -> None:
    there = {"INDILOG_TOKEN": "other", "INDILOG_URL": "https://box.example:8080/"}
    assert token("https://box.example:8080", **there) == "other"
    assert token("https://box.example", **there) == ""
    assert token(URL, **there) == ""
    assert token("http://127.0.0.1:8080", INDILOG_TOKEN="other") == "other"
    assert token(URL, INDILOG_TOKEN="other") == ""


@pytest.mark.usefixtures("up")
def test_the_callers_token_precedes_the_environments_and_that_the_machines() -> None:
    environment = {"INDILOG_TOKEN": "second", "INDILOG_URL": URL}
    assert reach(URL, token="first", environment=environment).token == "first"
    assert token(URL, **environment) == "second"
    assert reach(URL, token="", environment=environment).token == ""


@pytest.mark.usefixtures("directory")
def test_no_token_goes_to_another_machine_in_plain_text() -> None:
    for url in ("http://box.example:8080", "http://192.0.2.1", "http://127.0.0.1.nip.io"):
        with pytest.raises(ConfigError, match="could be intercepted"):
            reach(url, token=TOKEN, environment={})
        assert reach(url, environment={}).token == ""
    assert reach("https://box.example", token=TOKEN, environment={}).token == TOKEN


@pytest.mark.parametrize("wrong", ["two words", "line\nbreak", "ä", "t\r\nHost: evil"])
def test_a_malformed_token_is_refused(directory: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match="A token must be ASCII text without spaces"):
        reach(URL, token=wrong, environment={})


def test_a_dead_platform_is_not_found(up: Path, directory: Path) -> None:
    """Another process may use its port now, so a file without the lock of its process is stale."""
    [entry] = directory.glob("*.json")
    left = entry.read_bytes()
    assert entry.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "copy.json").write_bytes(left.replace(b"7001", b"7003"))
    (directory / "damaged.json").write_bytes(b"{")
    assert token("http://127.0.0.1:7003") == ""
    assert token(URL) == TOKEN


def test_the_files_of_killed_platforms_are_removed_by_the_next_one(
    directory: Path, tmp_path: Path
) -> None:
    code = (
        "import os, pathlib, sys\n"
        "from indilog.base.running_platforms import registered, running_at\n"
        "here, file = map(pathlib.Path, sys.argv[1:])\n"
        "up = running_at('127.0.0.1', 7001, token_file=file, certificate=None, socket=file)\n"
        "kept = registered(up, here)\n"
        "kept.__enter__()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(directory), str(tmp_path / "token")]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert len(list(directory.glob("*.json"))) == 1
    assert platform_at(URL) is None
    found = running_at("::1", 7002, token_file=None, certificate=None, socket=tmp_path / "s")
    with registered(found):
        assert [path.name for path in directory.glob("*.json")] == ["[::1]:7002.json"]
        assert platform_at("http://[::1]:7002") == found
    assert not list(directory.glob("*.json"))


@pytest.mark.usefixtures("up")
def test_a_directory_that_other_users_can_enter_is_ignored(directory: Path) -> None:
    directory.chmod(0o755)
    assert token(URL) == ""
    found = running_at("::1", 7002, token_file=None, certificate=None, socket=directory)
    with pytest.raises(PermissionError), registered(found):
        raise AssertionError("a platform was registered in an unsafe directory")
    directory.chmod(0o700)
    assert token(URL) == TOKEN


def test_a_symbolic_link_in_place_of_the_directory_is_ignored(
    up: Path, directory: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    directory.rename(elsewhere)
    directory.symlink_to(elsewhere)
    assert token(URL) == ""
    directory.unlink()
    elsewhere.rename(directory)


def test_a_platform_without_authentication_needs_no_token(directory: Path) -> None:
    found = running_at("127.0.0.1", 7001, token_file=None, certificate=None, socket=directory)
    with registered(found):
        assert token(URL) == ""


def test_a_token_that_cannot_be_read_is_one_sentence(up: Path) -> None:
    up.unlink()
    with pytest.raises(ConfigError, match="cannot be read from"):
        token(URL)


def test_tls_trusts_the_callers_file_or_the_platform_of_this_machine(
    directory: Path, tmp_path: Path
) -> None:
    certificate = tmp_path / "cert.pem"
    trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(str(certificate))
    url = "https://127.0.0.1:7001"
    for wrong in (tmp_path / "nowhere", Path(os.devnull)):
        with pytest.raises(ConfigError, match="The certificates in"):
            reach(url, ca=wrong, environment={})
    assert reach(url, environment={"INDILOG_CA": str(certificate)}).tls is not None
    found = running_at(
        "127.0.0.1", 7001, token_file=None, certificate=certificate, socket=directory
    )
    with registered(found):
        tls = reach(url, environment={}).tls
    assert tls is not None
    assert tls.check_hostname
    assert len(tls.get_ca_certs()) <= 1
