"""Why Spark cannot start, in one sentence each; without Spark."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from indilog_pipeline import session


def java(folder: Path, version: str) -> dict[str, str]:
    """Return an environment whose Java says that it is of `version`."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-20' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(folder)}


@pytest.fixture
def with_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


def test_without_pyspark_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'indilog[spark]'" in session.why_not()
    with pytest.raises(session.NoSparkError, match=r"indilog\[spark\]"):
        session.start()


@pytest.mark.usefixtures("with_pyspark")
def test_java_17_and_newer_can_run_it(tmp_path: Path) -> None:
    assert not session.why_not(java(tmp_path, "17.0.15"))


@pytest.mark.usefixtures("with_pyspark")
def test_an_older_java_or_none_is_one_sentence(tmp_path: Path) -> None:
    wanted = "Spark needs Java 17: install openjdk-17-jre-headless or set JAVA_HOME."
    assert session.why_not(java(tmp_path, "11.0.2")) == wanted
    assert session.why_not({"JAVA_HOME": str(tmp_path / "none")}) == wanted
    assert session.why_not({"PATH": str(tmp_path)}) == wanted


@pytest.mark.usefixtures("with_pyspark")
def test_a_submitted_program_needs_no_java_of_its_own(tmp_path: Path) -> None:
    assert not session.why_not({"PYSPARK_GATEWAY_PORT": "1", "PATH": str(tmp_path)})
