"""IndiLog installed from its wheel, used by a project whose folders have the same names as ours.

The environment contains only the wheel. Its dependencies are taken by a path from the environment
of the tests; this checkout is not on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.platform_process import ROOT, SETTINGS, platform

pytestmark = pytest.mark.cluster

PACKAGES = {
    *("indilog", "indilog_cells", "indilog_compute", "indilog_index", "indilog_ordering"),
    *("indilog_pipeline", "indilog_storage", "pyspark_indilog"),
    *("bokiflow", "bokiqueue", "bokistore", "bokistream", "bokiviews"),
}
IMPORTS = """\
    import importlib
    import pkgutil
    import sys

    count = 0
    names = sys.argv[1:]
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "pyspark":
                raise
            continue
        count += 1
        if hasattr(module, "__path__"):
            found = pkgutil.iter_modules(module.__path__, name + ".")
            names += [each.name for each in found if not each.name.endswith("__main__")]
    print(count)
    """
"""Imports packages and all modules in them, except programs; prints their number."""

PROJECT = {
    **{
        f"{folder}/__init__.py": f'NAME = "own {folder}"\n'
        for folder in ("compute", "index_tier", "ordering", "pipeline", "storage", "libs", "tests")
    },
    "functions/__init__.py": "",
    "functions/shop.py": '''\
        """An application of a user, with modules of the user's own."""

        import indilog
        from bokistore import Store
        from storage import NAME

        app = indilog.App("shop")


        async def sold(log: indilog.Log, item: str) -> str:
            before = await Store(log).increment(item, "sold")
            return f"{NAME}: {int(before or 0) + 1}"


        @app.function
        async def sell(ctx: indilog.Context, item: str) -> str:
            return await sold(ctx.log("shop"), item)
        ''',
    "test_shop.py": """\
        import asyncio

        import bokiflow
        import bokiqueue
        import bokistream
        import bokiviews
        import compute
        import index_tier
        import libs
        import ordering
        import pipeline
        import storage
        from functions import shop
        from indilog.testing import cluster


        def test_sell():
            async def sold():
                async with cluster() as client:
                    return await shop.sold(client.log("shop"), "tea")

            assert asyncio.run(sold()) == "own storage: 1"
            for module in (compute, index_tier, libs, ordering, pipeline, storage):
                assert module.NAME == f"own {module.__name__}"
            assert bokiflow.Workflow and bokiqueue.Queue
            assert bokistream.Streams and bokiviews.Views
        """,
    "embedded.py": """\
        import asyncio
        import sys

        import indilog
        from functions import shop


        async def main():
            async with indilog.open(sys.argv[1]) as client:
                print(await shop.sold(client.log("shop"), "tea"))


        if __name__ == "__main__":
            asyncio.run(main())
        """,
}


@dataclass
class Installed:
    """A virtual environment with the wheel, and a project of a user."""

    bin: Path
    project: Path

    def run(self, *words: str | Path, **environment: str) -> str:
        """Run a program of the environment in the project; return what it prints."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        done = subprocess.run(
            [self.bin / words[0], *words[1:]],
            cwd=self.project,
            env={**own, **SETTINGS, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    checkout = folder / "checkout"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        checkout.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, checkout)
    for name in (
        "indilog", "ordering", "storage", "index_tier", "compute", "cells", "pipeline", "libs",
    ):  # fmt: skip
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=checkout, check=True, capture_output=True)
    shutil.rmtree(checkout)
    [wheel] = folder.glob("*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    project = folder / "project"
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    return Installed(python.parent, project)


def test_the_wheel_adds_only_names_of_its_own(installed: Installed) -> None:
    listed = installed.run("python", "-m", "pip", "show", "--files", "indilog")
    top = set(re.findall(r"^  (\w+)/", listed, flags=re.MULTILINE))
    assert top == PACKAGES
    said = installed.run("python", "-c", "import indilog; print(indilog.__file__)")
    assert str(ROOT) not in said


def test_every_module_of_the_wheel_can_be_imported(installed: Installed) -> None:
    """Except for Spark's parts without PySpark, which is an extra."""
    count = int(installed.run("python", "-c", textwrap.dedent(IMPORTS), *sorted(PACKAGES)))
    assert count > 500


@pytest.mark.repeated("tests/cluster/test_installed.py")
def test_a_project_with_folder_names_of_indilog_tests_opens_and_deploys(
    installed: Installed, tmp_path: Path
) -> None:
    assert "1 passed" in installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert installed.run("python", "embedded.py", tmp_path / "embedded") == "own storage: 1\n"
    with platform(tmp_path / "up", python=installed.bin / "python", cwd=installed.project) as up:
        installed.run("indilog", "deploy", ".", INDILOG_URL=up.url)
        for count in (1, 2):
            said = installed.run("indilog", "invoke", "shop.sell", "item=tea", INDILOG_URL=up.url)
            assert f"own storage: {count}" in said
