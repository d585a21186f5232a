"""Rules of this code base: sizes, docstrings, roles without I/O, documents equal to the code.

ruff, mypy and import-linter hold the rest; these are the rules that no tool of theirs knows.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import typing
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from indilog.config import ClusterConfig
from indilog.config.group import SettingsGroup
from indilog.config.node import GROUPS
from indilog.wire import (
    base_messages,
    cell_messages,
    conditional_messages,
    growth_messages,
    messages,
    order_lookup_messages,
    owner_messages,
    replica_messages,
    sequencer_messages,
    tag_messages,
)
from tests.support import protocol_table, settings_table, state_diagrams

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "indilog", "ordering", "storage", "index_tier", "compute", "cells", "pipeline", "libs",
    "functions",
    "bench",
)  # fmt: skip
FILE_LINES_MAX = 800
"""A file beyond it holds more than one concept; the aim is 200 to 500 lines."""
FUNCTION_LINES_MAX = 60
FOLDER_FILES_MAX = 25
PROSE_COLUMNS_MAX = 100

ROLE_FOLDERS = ("ordering", "storage", "index_tier", "compute", "cells")
SHELLS = (
    "compute/indilog_compute/gateway",
    "compute/indilog_compute/invocations/outcome_waiters.py",
    "compute/indilog_compute/invocations/checkpoints.py",
    "compute/indilog_compute/invocations/runs.py",
    "compute/indilog_compute/invocations/service.py",
    "compute/indilog_compute/workers",
    "compute/indilog_compute/log_kinds/following_log.py",
    "compute/indilog_compute/log_kinds/kinds.py",
    "compute/indilog_compute/log_kinds/opened_segment.py",
    "compute/indilog_compute/log_kinds/route.py",
    "compute/indilog_compute/log_kinds/segmented_log.py",
    "compute/indilog_compute/log_service.py",
    "compute/indilog_compute/retention_service.py",
    "cells/indilog_cells/closed_generations.py",
    "cells/indilog_cells/copies.py",
    "cells/indilog_cells/driver.py",
    "cells/indilog_cells/log.py",
    "cells/indilog_cells/object_store.py",
    "cells/indilog_cells/opening.py",
)
"""What does I/O inside the tiers' folders: it faces people's code and sockets, and is no role."""
AWAITING = ("compute/indilog_compute/local_log.py",)
"""The face of the engine towards callers on the loop: may import asyncio for futures, no more."""
FORBIDDEN = {
    "asyncio", "concurrent", "multiprocessing", "os", "random", "requests", "secrets", "selectors",
    "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid", "uvloop", "zmq",
}  # fmt: skip
"""What a role may not import: it would give it a clock, chance, a thread, a disk or a network."""


@cache
def listed() -> tuple[Path, ...]:
    """Return every file that belongs to the project, whether committed yet or not."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode == 0:
        names = found.stdout.split("\0")
        return tuple(sorted(p for n in names if n and (p := ROOT / n).is_file()))
    hidden = {".git", ".venv", "__pycache__"}
    return tuple(sorted(p for p in ROOT.rglob("*") if p.is_file() and not hidden & set(p.parts)))


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    wanted = [ROOT / folder for folder in folders]
    return tuple(
        path
        for path in listed()
        if path.suffix == ".py" and any(path.is_relative_to(folder) for folder in wanted)
    )


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file; several rules look at each of them."""
    return tuple(ast.walk(tree_of(path)))


@pytest.fixture(autouse=True, scope="module")
def trees_are_no_garbage() -> Iterator[None]:
    """Scan no trees for garbage: their 1.6 million nodes would be scanned repeatedly while they are
    made, which takes three quarters of the time.
    """
    gc.disable()
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()
    gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the top-level names that a file imports, wherever in it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]


def test_there_is_code_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in sources(*CODE)} >= {"indilog", "ordering"}


def test_no_file_is_too_long() -> None:
    long = {
        name_of(path): lines
        for path in sources(*CODE, "tests")
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    }
    assert not long


def test_no_function_is_too_long() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines"
        for path in sources(*CODE, "tests")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(path)
        for path in sources(*CODE, "tests")
        if path.read_text().strip() and len(ast.get_docstring(tree_of(path)) or "") < 10
    ]
    assert not silent


def test_no_role_can_reach_a_clock_a_thread_or_a_network() -> None:
    shells = [ROOT / shell for shell in SHELLS]
    reaching = []
    for path in sources(*ROLE_FOLDERS):
        if any(path.is_relative_to(shell) for shell in shells):
            continue
        allowed = {"asyncio"} if name_of(path) in AWAITING else set()
        reaching += [
            f"{name_of(path)} imports {name}"
            for name in imports_of(path)
            if name in FORBIDDEN - allowed
        ]
    assert not reaching


def awaits(node: ast.AST) -> bool:
    """Tell whether an expression awaits."""
    return any(isinstance(part, ast.Await) for part in ast.walk(node))


def read_in(node: ast.AST) -> Iterator[str]:
    """Yield the attributes whose values an expression holds, once it has been evaluated."""
    if isinstance(node, ast.Await | ast.Lambda):
        return
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node)
        return
    for part in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Call) and part is node.func):
            yield from read_in(part)


def read_before_awaiting(nodes: Collection[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of attributes that one expression reads, keeps while it awaits something,
    and then uses. `+=` reads its target in the same way.
    """
    if not any(isinstance(node, ast.Await) for node in nodes):
        return
    for node in nodes:
        if isinstance(node, ast.AugAssign) and awaits(node.value):
            yield from ((node.lineno, name) for name in read_in(node.target))
        if not isinstance(node, ast.expr) or isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda):
            continue
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            parts.remove(node.func)
        for place, part in enumerate(parts):
            if any(awaits(later) for later in parts[place + 1 :]):
                yield from ((node.lineno, name) for name in read_in(part))


def test_no_expression_reads_what_may_change_while_it_awaits() -> None:
    """A session's position was read so, before the append that raised it: the answer said that the
    session had not seen its own batch.
    """
    early = [
        f"{name_of(path)}:{line} reads {name}, then awaits"
        for path in sources(*CODE)
        for line, name in read_before_awaiting(nodes_of(path))
    ]
    assert not early


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("Appended(mine.position, tuple(await log.append_batch([])))", ["mine.position"]),
        ("self.total += await more()", ["self.total"]),
        ("self.total + await more()", ["self.total"]),
        ("(max(0, self.total), await more())", ["self.total"]),
        ("self.log.append(await data())", []),
        ("await self.log.append(self.data)", []),
        ("(await one(self.a), await two(self.b))", []),
        ("self.is_open and await more()", []),
    ],
)
def test_a_value_kept_while_awaiting_is_noticed(code: str, names: list[str]) -> None:
    found = read_before_awaiting([*ast.walk(ast.parse(f"async def act():\n    {code}"))])
    assert [name for _, name in found] == names


def test_only_the_transport_knows_zmq() -> None:
    knowing = {name_of(path) for path in sources(*CODE) if "zmq" in imports_of(path)}
    assert all(name.startswith("indilog/runtime/") for name in knowing)


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not [name_of(path) for path in sources(*CODE) if banned & set(imports_of(path))]


def test_no_module_has_a_name_without_meaning() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert not [name_of(path) for path in sources(*CODE, "tests") if path.stem in empty]


def test_nothing_is_left_undone() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        f"{name_of(path)}:{number}"
        for path in sources(*CODE, "tests")
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert not left


def test_no_file_knows_somebodys_machine_or_package_index() -> None:
    foreign = re.compile(r"/(home|Users|work)/\w|(?<!emit-)index-url|find-links|/simple\b|\.pypirc")
    knowing = [
        f"{name_of(path)}:{number}"
        for path in listed()
        if path.suffix != ".lock" and path.name != Path(__file__).name
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if foreign.search(line)
    ]
    index = [
        name_of(path)
        for path in listed()
        if path.suffix == ".lock" and re.search(r"https?://|file://|--index", path.read_text())
    ]
    assert not knowing + index


def test_the_protocol_document_equals_the_code() -> None:
    document = protocol_table.DOCUMENT.read_text()
    assert protocol_table.renewed(document) == document, (
        "python -m tests.support.protocol_table --write"
    )


def test_every_wire_message_is_in_the_protocol() -> None:
    described = [
        kind
        for module in (
            messages,
            sequencer_messages,
            tag_messages,
            order_lookup_messages,
            replica_messages,
            base_messages,
            cell_messages,
            conditional_messages,
            growth_messages,
            owner_messages,
        )
        for kind in protocol_table.messages_of(module)
        if protocol_table.row_of(kind)
    ]
    assert set(described) == set(typing.get_args(messages.Message))


def test_a_message_that_does_not_say_what_loss_means_is_noticed() -> None:
    class Silent:
        """storage → engine: something."""

    with pytest.raises(ValueError, match="Silent does not say"):
        protocol_table.row_of(Silent)


def test_the_configuration_document_equals_the_code() -> None:
    document = settings_table.DOCUMENT.read_text()
    assert settings_table.renewed(document) == document, (
        "python -m tests.support.settings_table --write"
    )


@pytest.mark.parametrize("diagram", state_diagrams.DIAGRAMS, ids=lambda diagram: diagram.name)
def test_the_state_diagrams_equal_the_code(diagram: state_diagrams.Diagram) -> None:
    document = diagram.document.read_text()
    assert diagram.renewed(document) == document, "python -m tests.support.state_diagrams --write"


def test_every_setting_with_a_dimension_ends_with_its_unit() -> None:
    parts: list[type[SettingsGroup]] = [ClusterConfig, *GROUPS.values()]
    unitless = [
        field.name
        for part in parts
        for field in dataclasses.fields(part)
        if re.search(r"(time|timeout|size|interval|delay)$", field.name)
    ]
    assert not unitless


def test_every_package_is_typed_for_those_who_import_it() -> None:
    packages = [
        "indilog",
        "ordering/indilog_ordering",
        "storage/indilog_storage",
        "index_tier/indilog_index",
        "compute/indilog_compute",
        "cells/indilog_cells",
        "pipeline/indilog_pipeline",
        "libs/bokistore",
        "libs/bokiqueue",
        "libs/bokistream",
        "libs/bokiviews",
        "libs/bokiflow",
    ]
    assert all((ROOT / package / "py.typed").exists() for package in packages)


@pytest.mark.parametrize(
    "package",
    [
        *("indilog", "indilog.sdk", "indilog.replayed", "indilog.testing"),
        *("bokistore", "bokiqueue", "bokistream", "bokiviews", "bokiflow"),
    ],
)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_every_package_that_the_wheel_imports_comes_with_it() -> None:
    """The dependencies in `pyproject.toml`, and theirs, have all that an installed IndiLog imports.
    Only the parts for Spark need what is an extra.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = installed_with(project["project"]["dependencies"])
    providers = importlib.metadata.packages_distributions()
    known = sys.stdlib_module_names | {
        Path(package).name
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    lacking = [
        f"{name_of(path)} imports {name}"
        for path in sources("indilog", *ROOTS)
        for name in set(imports_of(path)) - known - {"pyspark", "py4j"}
        if installed.isdisjoint(map(normal, providers.get(name, ())))
    ]
    assert not lacking


def installed_with(requirements: list[str]) -> set[str]:
    """Return the names of all distributions that are installed for these requirements."""
    found: set[str] = set()
    while requirements:
        requirement = Requirement(requirements.pop())
        name = normal(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        requirements += importlib.metadata.requires(name) or []
    return found


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    missing = [path.name for path in folder.glob("[0-9]*.md") if f"({path.name})" not in index]
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{name_of(path)}: {target}"
        for path in listed()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken


def test_references_to_documents_lead_somewhere() -> None:
    architecture = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    sections = dict(re.findall(r"^## (\d+)\. .*\n((?:(?!^## ).*\n)*)", architecture, re.MULTILINE))
    pitfalls = set(
        re.findall(r"^\| (A?\d+) \|", (ROOT / "docs" / "PITFALLS.md").read_text(), re.MULTILINE)
    )
    astray = []
    for path in sources(*CODE, "tests"):
        text = " ".join(path.read_text().split())
        for section, item in re.findall(r"ARCHITECTURE (\d+)(?:\.(\d+))?", text):
            lines = sections.get(section, "").splitlines()
            if not lines or (item and not any(line.startswith(f"{item}. ") for line in lines)):
                astray.append(f"{name_of(path)}: ARCHITECTURE {section}.{item}")
        astray += [
            f"{name_of(path)}: PITFALLS {number}"
            for number in re.findall(r"PITFALLS (A?\d+)", text)
            if number not in pitfalls
        ]
    assert not astray


PRIVATE_WORDS = {
    r"signs? of life": "heartbeat",
    r"heirs?": "new owner",
    r"departed": "dead",
    r"suspects?": "crash-looping",
    r"pass(es|ed|ing) over": "skipping; of an error: transient",
    r"told of": "notified of",
    r"whoever": "the caller, the node, the process",
    r"nobody": "no caller, no node, no process",
    r"somebody|anybody|everybody": "a caller, any node, all nodes",
    r"last words?": "crash location",
    r"full notices?": "disk-full notification",
    r"superfluous": "reclaimable",
    r"hollow(ed|s)?": "tombstone",
    r"rot|rots|rotten": "corruption, corrupt",
    r"for good": "permanently",
    r"in the end": "finally",
    r"lest": "so that ... not",
    r"(is|are|was|were|be) told": "is notified, gets, is answered",
    r"steady (clock|time|now)": "monotonic",
    r"takes? turns": "round robin; run interleaved",
    r"in vain": "without a result; times out",
    r"again and again": "repeatedly",
    r"begun (again|anew)": "restarted, rerun",
    r"(given|gives|giving|gave) back": "freed, released, requeued, returned",
    r"mend(s|ed|ing)?": "correct, repair",
    r"presence": "heartbeat, lease",
    r"(rides?|riding) out": "retries during",
    r"(holds?|held) for lost": "regards as lost",
    r"(this|next|earlier|later|each|one) li(fe|ves)": "incarnation, run of a process",
    r"homeless|imagined": "without an engine; false",
}
"""Words that stand for a mechanism here and nowhere else, and the field's term for each."""
WORDS_EXEMPT = {
    "tests/test_tidy.py": "lists them",
    "bench/support/servers.py": "nobody is a user of the operating system",
}


def test_names_and_prose_use_the_terms_of_the_field() -> None:
    # In lower case it is found in half the time that a search without regard to case takes.
    words = re.compile(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b")
    found = []
    for path in listed():
        if path.suffix not in {".py", ".md", ".toml", ".yml", ""} or name_of(path) in WORDS_EXEMPT:
            continue
        text = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", path.read_text()).lower()
        for match in words.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            word = match[0]
            [term, *_] = [t for w, t in PRIVATE_WORDS.items() if re.fullmatch(w, word)]
            found.append(f"{name_of(path)}:{line}: {word!r}; say: {term}")
    assert not found, "\n".join(found)


def test_prose_in_documents_is_wrapped() -> None:
    """Tables, code and lines with an address of the web may be longer."""
    long: list[str] = []
    for path in listed():
        if path.suffix != ".md":
            continue
        is_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith("|") and "://" not in line:
                long += [f"{name_of(path)}:{number}"] * (len(line) > PROSE_COLUMNS_MAX)
    assert not long


def test_no_folder_has_too_many_files() -> None:
    """Decisions are numbered and read by their index, so their folder may grow."""
    folders = Counter(
        (path.parent, path.suffix)
        for path in listed()
        if path.suffix in {".py", ".md", ".txt", ".html", ".js"}
        and path.parent != ROOT / "docs" / "decisions"
    )
    assert not [f"{name_of(f)}: {n} {s}" for (f, s), n in folders.items() if n > FOLDER_FILES_MAX]


def repeats(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return what shows the same as a test that is marked `repeated`, "" if it does not say so;
    None: it is not marked.
    """
    for decorator in function.decorator_list:
        text = ast.unparse(decorator)
        if text.startswith("pytest.mark.repeated"):
            return "".join(re.findall(r"\('([^']*)'\)$", text))
    return None


def test_a_repeated_test_names_tests_that_run_by_default() -> None:
    """Else what it shows is shown with `--all` only."""
    repeated: dict[str, str] = {}
    by_default: set[Path] = set()
    for path in sources("tests"):
        if not path.name.startswith("test_"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                by = repeats(node)
                if by is not None:
                    repeated[f"{name_of(path)}::{node.name}"] = by
                elif node.name.startswith("test_"):
                    by_default |= {path, *path.parents}
    assert len(repeated) > 50
    assert not [name for name, by in repeated.items() if not by or ROOT / by not in by_default]


ROOTS = ("ordering", "storage", "index_tier", "compute", "cells", "pipeline", "libs")
"""Folders whose packages are imported without the folder's name."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ROOTS else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by_modules() -> dict[str, set[str]]:
    """Return which modules each module imports from, also for types alone."""
    nodes = {module_of(path): nodes_of(path) for path in sources("indilog", *ROOTS)}
    graph: dict[str, set[str]] = {module: set() for module in nodes}
    for module, of_module in nodes.items():
        for node in of_module:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                found = {name if name in nodes else node.module for name in names}
            elif isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            else:
                continue
            graph[module] |= {name for name in found if name in nodes and name != module}
    return graph


def test_no_modules_import_each_other() -> None:
    """Imports for types alone count, too, although import-linter leaves them out: each module can
    be read before those that use it.
    """
    graph = imported_by_modules()
    assert len(graph) > 300
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


SHARED_CLASS_NAMES = {
    # Each example application sells something else, and both are read alone.
    "Order": {"functions.orders.sales", "functions.travel.app"},
    # Public: the replica of a sub-stream's state, and of a state machine without such a state.
    "Replica": {"indilog.replayed.replica", "bokistore.replica"},
    # Public: what is derived from records, and how far a run of a workflow has come.
    "State": {"indilog.replayed.replica", "bokiflow.runs.states"},
    # Public: one of each library, with the same use.
    "Transaction": {"bokistore.transaction", "bokiviews.transaction"},
}
"""Class names that two modules may define, because applications use both under this name."""


def modules_by_class() -> dict[str, set[str]]:
    """Return the modules that define each class, by its name; private names count per package."""
    found = defaultdict[str, set[str]](set)
    for path in sources(*CODE):
        module = module_of(path)
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                is_private = node.name.startswith("_")
                scope = f"{module.partition('.')[0]}." if is_private else ""
                found[scope + node.name].add(module)
    return found


def test_a_class_name_stands_for_one_class() -> None:
    """A reader who searches for a name finds one class, unless `SHARED_CLASS_NAMES` has it."""
    shared = {name: modules for name, modules in modules_by_class().items() if len(modules) > 1}
    assert shared == SHARED_CLASS_NAMES
