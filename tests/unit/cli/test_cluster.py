"""`indilog cluster init` and `key`: files, modes, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from indilog.base.errors import ConfigError
from indilog.cli.commands import app
from indilog.config import config_from
from indilog.runtime.transport.peer_keys import keys_in


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments])


def modes_in(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


def test_init_makes_an_authority_and_keys_whose_private_parts_are_this_users(
    tmp_path: Path,
) -> None:
    done = run("init", str(tmp_path / "keys"), "--node", "a", "--node", "b")
    assert done.exit_code == 0, done.output
    folders = {folder.name for folder in (tmp_path / "keys").iterdir()}
    assert folders == {"authority", "a", "b"}
    authority = tmp_path / "keys" / "authority"
    assert modes_in(authority) == {"cluster.key": 0o600, "cluster.pem": 0o644, "token": 0o600}
    for node in "ab":
        folder = tmp_path / "keys" / node
        assert modes_in(folder) == {
            "node.key": 0o600, "node.pem": 0o644, "cluster.pem": 0o644, "token": 0o600,
        }  # fmt: skip
        assert (folder / "token").read_text() == (authority / "token").read_text()
        assert folder.stat().st_mode & 0o777 == 0o700
        keys_in(folder)


def test_key_makes_keys_of_a_further_node_once(tmp_path: Path) -> None:
    assert run("init", str(tmp_path)).exit_code == 0
    assert run("key", str(tmp_path), "c").exit_code == 0
    keys_in(tmp_path / "c")
    before = (tmp_path / "c" / "node.key").read_bytes()
    again = run("key", str(tmp_path), "c")
    assert again.exit_code == 2
    assert "exists already; nothing was changed." in again.output
    assert (tmp_path / "c" / "node.key").read_bytes() == before


def test_a_second_authority_in_a_directory_is_refused(tmp_path: Path) -> None:
    assert run("init", str(tmp_path)).exit_code == 0
    assert run("init", str(tmp_path), "--node", "b").exit_code == 2
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["../x", "authority", "A", "", "a.new", "x" * 64])
def test_a_name_that_is_no_folder_of_a_node_is_refused(tmp_path: Path, name: str) -> None:
    assert run("init", str(tmp_path / "keys")).exit_code == 0
    done = run("key", str(tmp_path / "keys"), name)
    assert done.exit_code == 2
    assert "cannot be the name of a node's keys" in done.output


def test_without_an_authority_there_is_one_sentence(tmp_path: Path) -> None:
    done = run("key", str(tmp_path), "a")
    assert done.exit_code == 2
    assert "make one with `indilog cluster init`" in done.output


def test_a_crash_while_keys_are_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("init", str(tmp_path)).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run("key", str(tmp_path), "a")
    assert not (tmp_path / "a").exists()
    assert run("key", str(tmp_path), "a").exit_code == 0
    keys_in(tmp_path / "a")


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"node_host": "192.0.2.7"}, "Nodes do not listen on 192.0.2.7 without keys"),
        ({"node_host": "2001:db8::1"}, "Nodes do not listen on 2001:db8::1 without keys"),
        ({"node_host": "0.0.0.0", "node_keys": "k"}, "node_host must be an IP address at which"),
        ({"node_host": "box.example"}, "node_host must be an IP address at which"),
        ({"node_host": "127.0.0.1", "node_port": 70_000}, "node_port must be 1 to 65,535"),
        (
            {"node_host": "192.0.2.7", "node_keys": "k", "transport": "zmq"},
            'transport = "zmq" does not encrypt',
        ),
    ],
)
def test_settings_that_would_open_a_platform_to_others_are_refused(
    node: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_from(overrides={"node": node})
