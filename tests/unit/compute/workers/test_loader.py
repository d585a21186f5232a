"""Importing deployed sources: versions side by side, own modules first, mistakes reported."""

from __future__ import annotations

import asyncio
import errno
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from indilog.base.errors import DeployError, DiskFullError
from indilog_compute.workers.loader import LoadedDeployment, load

_numbers = itertools.count(10_000)
HEAD = "from indilog.apps.app import App\napp = App('demo')\n"


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[list[LoadedDeployment]]:
    """What a test loaded; unloaded afterwards."""
    there: list[LoadedDeployment] = []
    before = (set(sys.modules), list(sys.meta_path))
    yield there
    for one in there:
        one.unload()
    assert not [m for m in set(sys.modules) - before[0] if m.startswith("indilog_deployed_")]
    assert sys.meta_path == before[1]
    assert list(tmp_path.iterdir()) == []


def load_in(
    directory: Path,
    loaded: list[LoadedDeployment],
    sources: Mapping[str, str],
    name: str | None = None,
) -> LoadedDeployment:
    one = load(next(_numbers), name, sources, directory)
    loaded.append(one)
    return one


def result(one: LoadedDeployment) -> object:
    value = one.functions["f"].body()
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


def test_two_versions_live_side_by_side(tmp_path: Path, loaded: list[LoadedDeployment]) -> None:
    source = HEAD + "@app.function\ndef f() -> int:\n    return {}\n"
    first = load_in(tmp_path, loaded, {"demo.py": source.format(1)})
    second = load_in(tmp_path, loaded, {"demo.py": source.format(2)})
    assert (result(first), result(second)) == (1, 2)


def test_code_imports_its_own_modules_however_it_names_them(
    tmp_path: Path, loaded: list[LoadedDeployment]
) -> None:
    one = load_in(
        tmp_path,
        loaded,
        {
            "demo/__init__.py": HEAD + "from demo import late\nfrom .late import g\n",
            "demo/late.py": "import demo.deep.numbers as n\nfrom demo import app\n"
            "from demo.deep import numbers\nimport demo.deep.numbers\n"
            "def g(): return 1\n"
            "@app.function\ndef f() -> list[int]:\n"
            "    return [n.N, numbers.N, demo.deep.numbers.N]\n",
            "demo/deep/__init__.py": "",
            "demo/deep/numbers.py": "N = 4",
        },
    )
    assert result(one) == [4, 4, 4]


def test_a_folder_without_a_package_imports_its_neighbours(
    tmp_path: Path, loaded: list[LoadedDeployment]
) -> None:
    sources = {
        "main.py": HEAD + "import json, statistics_of_mine\n@app.function\ndef f() -> int:\n"
        "    import lazily\n    return statistics_of_mine.N + lazily.N\n",
        "statistics_of_mine.py": "N = 2",
        "lazily.py": "N = 3",
    }
    assert result(load_in(tmp_path, loaded, sources)) == 5


def test_the_deployments_own_module_wins_over_an_installed_one(
    tmp_path: Path, loaded: list[LoadedDeployment]
) -> None:
    import json

    sources = {
        "main.py": HEAD + "import json\n@app.function\ndef f() -> str:\n    return json.MINE\n",
        "json.py": "MINE = 'mine'",
    }
    assert result(load_in(tmp_path, loaded, sources)) == "mine"
    assert not hasattr(json, "MINE")


def test_a_name_given_at_deployment_replaces_the_one_in_the_code(
    tmp_path: Path, loaded: list[LoadedDeployment]
) -> None:
    source = HEAD + "@app.function\ndef f() -> int:\n    return 1\n"
    one = load_in(tmp_path, loaded, {"demo.py": source}, name="other")
    assert one.app.name == "other"
    assert [spec.name for spec in one.specs()] == ["f"]


def test_an_application_may_have_only_workflows(
    tmp_path: Path, loaded: list[LoadedDeployment]
) -> None:
    source = HEAD + (
        "import bokiflow\nflow = bokiflow.Flow(app)\n"
        "@flow.workflow\nasync def tour(wf: bokiflow.Workflow) -> None: ...\n"
    )
    one = load_in(tmp_path, loaded, {"demo.py": source, "more.py": ""})
    assert one.app.functions == {}
    assert "runs.start" in one.app.operations


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ({"a.py": "x = 1\ny ="}, r"a\.py, line 2: SyntaxError"),
        ({"a.py": "\nimport nothing_like_it"}, r"a\.py, line 2: ModuleNotFoundError"),
        ({"a.py": "import b", "b.py": "1/0"}, r"b\.py, line 1: ZeroDivisionError"),
        ({"a.py": "import b\n", "b.py": "import missing"}, r"b\.py, line 1: .*'missing'"),
        ({"a.py": "raise SystemExit(3)"}, r"a\.py, line 1: SystemExit: 3"),
        ({"a.py": "x = 1"}, "defines no application"),
        ({"a.py": HEAD}, r"App demo has no functions; decorate at least one with @app\.function"),
        ({"a.py": "raise KeyboardInterrupt"}, r"a\.py, line 1: KeyboardInterrupt\."),
        (
            {"a.py": "from b import g\n", "b.py": ""},
            r"a\.py, line 1: ImportError: cannot import name 'g' from 'b' \(b\.py\)\.",
        ),
        (
            {"a.py": "from pathlib import Path\n(Path(__file__).parent / 'data').read_text()\n"},
            r"a\.py, line 2: FileNotFoundError: .* No such file or directory: 'data'\.",
        ),
        ({"notes.txt": "x"}, "no Python file"),
        ({}, "no Python file"),
        ({"../a.py": "x"}, "not a path inside"),
        ({"/etc/a.py": "x"}, "not a path inside"),
        ({"a.py": "x", "b/../c.py": "x"}, "not a path inside"),
        ({"a.py": HEAD + "@app.function\ndef f(*a: int): ..."}, "a name of its own"),
        ({"a.py": HEAD + "@app.function\ndef f(a: 'Nope'): ..."}, "cannot be resolved"),
        (
            {"a.py": HEAD + "b = App('b')\n@app.function\ndef f(): ...\n@b.function\ndef g(): ..."},
            r"2 applications \(b, demo\)",
        ),
        (
            {
                "a.py": HEAD + "@app.function\ndef f(): ...",
                "b.py": "import indilog\napp = indilog.App('demo')\n",
            },
            r"another application than demo: b\.py, line 2; deploy each one from a file or folder",
        ),
        ({"a.py": "\0"}, "null"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(
    tmp_path: Path, loaded: list[LoadedDeployment], sources: dict[str, str], sentence: str
) -> None:
    with pytest.raises(DeployError, match=sentence) as caught:
        load_in(tmp_path, loaded, sources)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert "indilog_deployed_" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "no file of it is left"


def test_a_full_disk_is_reported_as_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is no fault of the code, and the error is transient."""

    def no_room(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(DiskFullError, match="There is no disk space left to write") as reported:
        load(next(_numbers), None, {"a.py": HEAD}, tmp_path)
    assert reported.value.retryable
