"""The token file of a data directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.runtime.cluster.token_file import token_in


def test_the_first_start_creates_a_token_that_later_starts_reuse(tmp_path: Path) -> None:
    token = token_in(tmp_path)
    assert token_in(tmp_path) == token
    assert len(token) >= 43, "256 bits in base64"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_processes_that_start_at_the_same_time_get_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(token_in, [tmp_path] * 64))) == 1


def test_two_directories_have_different_tokens(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert token_in(tmp_path / "one") != token_in(tmp_path / "two")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_file_that_other_users_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    token_in(tmp_path)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(ConfigError, match=f"Other users can read .* \\(mode {mode:o}\\)"):
        token_in(tmp_path)


@pytest.mark.parametrize("text", ["", "short", "ä" * 50, "x" * 200, "a b" * 20])
def test_a_malformed_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no token"):
        token_in(tmp_path)


def test_a_path_that_is_no_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryError, match="cannot be used"):
        token_in(tmp_path / "file")
