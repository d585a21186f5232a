"""The commands in the README's "Five minutes" work as written there, in order."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.cluster.platform_process import ROOT, platform

README = (ROOT / "README.md").read_text()
HOST = "localhost:8080"
pytestmark = pytest.mark.cluster


class Reader:
    """A reader that follows the README from top to bottom."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.source = directory / "visits.py"

    def types(self, command: str) -> str:
        """Run a command of the README; return its output."""
        words = shlex.split(command, comments=True)
        if words[0] == "curl":
            options = dict(itertools.pairwise(words))
            name, _, value = self.shell(f'printf %s "{options["-H"]}"').partition(": ")
            [asked] = [word for word in words if word.startswith(HOST)]
            answer = httpx.post(
                self.url + asked.removeprefix(HOST),
                content=options["--json"],
                headers={"content-type": "application/json", name: value},
                trust_env=False,
                timeout=120,
            )
            return answer.raise_for_status().text
        assert words[0] == "indilog"
        return self.shell(command)

    def shell(self, command: str) -> str:
        """Run a command in a shell, as at a terminal."""
        own = self.directory / "bin"
        own.mkdir(exist_ok=True)
        program = own / "indilog"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m indilog "$@"\n')
        program.chmod(0o755)
        path = f"{own}:{os.environ['PATH']}"
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.directory,
            env=os.environ | {"INDILOG_URL": self.url, "PYTHONPATH": str(ROOT), "PATH": path},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def runs(self, block: str) -> str:
        """Run a program of the README until it prints a line; only its URL is another one."""
        program = self.directory / "program.py"
        program.write_text(block.replace(f"http://{HOST}", self.url))
        with subprocess.Popen(
            [sys.executable, program],
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            timer = threading.Timer(200, running.kill)
            timer.start()
            try:
                return running.stdout.readline().strip()
            finally:
                timer.cancel()
                running.kill()

    def tests(self, block: str) -> None:
        """Run the README's test of its functions."""
        (self.directory / "test_visits.py").write_text(block)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_visits.py"],
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout


def blocks(of: str = "") -> list[str]:
    """Return the README's blocks of code of a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language == of]


def commands(block: str) -> list[str]:
    return re.findall(r"^\$ (.*)$", block, re.MULTILINE)


def test_the_commands_of_the_readme_print_what_it_shows(tmp_path: Path) -> None:
    """The README trims the log before its program subscribes; the program must work then, too."""
    functions, workflow, client, test = blocks("python")
    first, second, look = filter(None, map(commands, blocks()))
    with platform(tmp_path / "data") as up:
        reader = Reader(up.url, tmp_path)
        reader.source.write_text(functions)
        _deployed, *reported = [reader.types(command) for command in first]
        assert [json.loads(printed) for printed in reported] == [0, 1, ["ann", "bob"]]

        reader.source.write_text(functions + workflow)
        _deployed, started, shown = [reader.types(command) for command in second]
        assert started == "tour-cleo"
        assert "Run tour-cleo of visits: running." in shown

        read = reader.types(look[0])
        for command in look[1:]:
            assert reader.types(command), command
        trim = "indilog log trim visits --until SEQNUM"
        assert f"`{trim}`" in README
        reader.types(trim.replace("SEQNUM", read.splitlines()[-1].split()[0]))
        assert reader.runs(client).endswith("b'hello'")
        reader.tests(test)
