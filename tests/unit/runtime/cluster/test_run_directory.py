"""Run directories are removed after their owner ended or crashed, and never while it runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from indilog.runtime.cluster.run_directory import RunDirectory, remove_stale_directories

OWNER = """
import sys
from indilog.runtime.cluster.run_directory import RunDirectory
print(RunDirectory().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_the_next_start_removes_the_directory_of_a_killed_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        (path / "socket").touch()
        remove_stale_directories()
        assert (path / "socket").exists()
        owner.kill()
        owner.wait()
    remove_stale_directories()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_removes_its_own_directory() -> None:
    mine, other = RunDirectory(), RunDirectory()
    mine.remove()
    remove_stale_directories()
    assert not mine.path.exists()
    assert other.path.exists()
    other.remove()


def test_directories_that_belong_to_no_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "indilog-run-of-another").mkdir()
    (tmp_path / "indilog-run-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner").touch()
    remove_stale_directories()
    assert len(list(tmp_path.iterdir())) == 3
