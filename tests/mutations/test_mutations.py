"""What is mutated, and with which tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.changed_tests import PATHS
from tests.mutations.__main__ import noticed_by, steps
from tests.mutations.sites import FOLDERS, ROOT, Site, sample, sites

ALL = 1 << 20


def mutations(source: str) -> list[str]:
    """Return the mutated lines of a source."""
    text = source.encode()
    mutated = [site.mutated(text).decode() for site in sites("a.py", text)]
    return [
        new.strip()
        for one in mutated
        for old, new in zip(source.splitlines(), one.splitlines(), strict=True)
        if old != new
    ]


@pytest.mark.parametrize(
    ("line", "mutated"),
    [
        ("f(a < b)", ["pass", "f((a <= b))"]),
        ("x = a and b", ["x = (a or b)"]),
        ("x = a - b", ["x = (a + b)"]),
        ("x = not a", ["x = (a)"]),
        ("x = 7", ["x = 8"]),
        ("x = False", ["x = True"]),
        ("x = a[b:c]", ["x = a[b + 1:c]", "x = a[b:c + 1]"]),
        ("await f()", ["pass"]),
        ("for x in y: break", ["for x in y: continue"]),
        ('x = "a" + b', []),
        ('x: Annotated[int, 7] = "a"', []),
        ("assert a < b", []),
        ('x = f"{a + 1}"', []),
        ('structlog.get_logger().info("a", b=1)', []),
    ],
)
def test_each_operator_number_and_statement_is_changed_but_no_text(
    line: str, mutated: list[str]
) -> None:
    assert mutations(line) == mutated


def test_a_condition_that_is_returned_is_negated() -> None:
    source = "def f() -> bool:\n    return g(a)\ndef h() -> int:\n    return g(a)\n"
    assert mutations(source) == ["return not g(a)"]


def test_checks_and_representations_are_not_changed() -> None:
    source = "class A:\n    def check_invariants(self): f(1)\n    def __repr__(self): f(1)\n"
    assert mutations(source) == []


@pytest.fixture(scope="module")
def found() -> list[Site]:
    return sample(1, ALL)


def test_every_mutation_of_the_project_is_python_and_another_program(found: list[Site]) -> None:
    assert {site.file for site in found if site.file.startswith(FOLDERS)} == {
        site.file for site in found
    }
    assert len(set(found)) == len(found) > 5000
    for site in found[::200]:
        source = (ROOT / site.file).read_bytes()
        mutated = site.mutated(source)
        assert mutated != source
        compile(mutated, site.file, "exec")


def test_every_folder_with_a_package_is_mutated_but_that_of_spark() -> None:
    assert set(PATHS) - {".", "pipeline"} <= set(FOLDERS)


def test_a_seed_chooses_the_same_mutations_after_edits_elsewhere() -> None:
    source = b"def f():\n    x = 1\n"
    (before,) = sites("a.py", source)
    *_, after = sites("a.py", b"def g(y):\n    return y + 2\n\n" + source)
    assert (before.line, after.line) == (2, 5)
    assert before.digest(3) == after.digest(3) != before.digest(4)


def test_every_mutated_file_has_tests_that_exist(found: list[Site]) -> None:
    for site in {site.file: site for site in found}.values():
        for step in steps(site, is_narrow=True):
            assert [name for name in step if name.startswith("tests/")]


@pytest.mark.parametrize(
    ("claim", "by"), [("f() == 1", "FAILED test_a.py::test_f"), ("f() > 0", None)]
)
def test_a_mutation_is_noticed_if_a_test_fails_because_of_it(
    tmp_path: Path, claim: str, by: str | None
) -> None:
    assert noticed_by(tmp_path, *tried(tmp_path, claim)) == by
    assert (tmp_path / "a.py").read_text() == "def f():\n    return 1\n"


def test_a_test_that_fails_anyway_notices_nothing(tmp_path: Path) -> None:
    """Else all mutations of a module count as noticed while one of its tests is broken."""
    with pytest.raises(RuntimeError, match="test_f fails without a mutation"):
        noticed_by(tmp_path, *tried(tmp_path, "f() == 7"))


def test_a_step_that_selects_no_test_notices_nothing(tmp_path: Path) -> None:
    site, [step] = tried(tmp_path, "f() == 1")
    assert noticed_by(tmp_path, site, [(*step, "-k", "other")]) is None


def tried(tree: Path, claim: str) -> tuple[Site, list[tuple[str, ...]]]:
    """Write a module and its test to `tree`; return a mutation of the module, and that test."""
    (tree / "a.py").write_text("def f():\n    return 1\n")
    (tree / "test_a.py").write_text(
        "import logging\nfrom a import f\n\n"
        f"def test_f():\n    logging.error('captured')\n    assert {claim}\n"
    )
    (site,) = sites("a.py", (tree / "a.py").read_bytes())
    return site, [("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_a.py")]
