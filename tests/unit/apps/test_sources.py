"""The files that are deployed from a file, a package or a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from indilog.apps import sources
from indilog.apps.sources import sources_of
from indilog.base.errors import DeployError


def written(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}")
    return root


def test_a_file_is_deployed_under_its_own_name(tmp_path: Path) -> None:
    written(tmp_path, "social.py")
    assert sources_of(tmp_path / "social.py") == {"social.py": "# social.py"}


def test_a_packages_files_are_below_its_name(tmp_path: Path) -> None:
    package = written(tmp_path / "social", "__init__.py", "graph.py", "deep/x.py", "data.json")
    assert sorted(sources_of(package)) == [
        "social/__init__.py",
        "social/data.json",
        "social/deep/x.py",
        "social/graph.py",
    ]


def test_a_folders_files_are_at_the_top(tmp_path: Path) -> None:
    assert sorted(sources_of(written(tmp_path, "main.py", "lib.py"))) == ["lib.py", "main.py"]


def test_hidden_compiled_and_test_files_are_not_deployed(tmp_path: Path) -> None:
    written(tmp_path, "main.py", ".git/x.py", "__pycache__/x.py", "tests/test_x.py", "a.bin")
    assert sorted(sources_of(tmp_path)) == ["main.py"]


@pytest.mark.parametrize("name", ["missing.py", "notes.txt", "empty"])
def test_a_path_that_cannot_be_deployed_is_reported(tmp_path: Path, name: str) -> None:
    written(tmp_path, "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DeployError, match=name):
        sources_of(tmp_path / name)


def test_a_folder_given_by_mistake_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SOURCES_BYTES_MAX", 10)
    with pytest.raises(DeployError, match="leave data files out"):
        sources_of(written(tmp_path, "main.py", "more.py"))
