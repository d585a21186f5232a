"""Installs missing peers of `bench.flow_peers` into a separate directory.

The Python packages of `requirements/peers.lock` are installed into a virtual environment. The npm
packages of `requirements/peers-npm/package-lock.json` are installed into a folder. Only packages
with a hash in these files are installed, and no install script of an npm package runs. A peer that
cannot be installed is reported, and the comparison runs without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from bench.support.harness import ROOT

INSTALL_S_MAX: Final = 600.0
_LOCK: Final = ROOT / "requirements" / "peers.lock"
_NPM: Final = ROOT / "requirements" / "peers-npm"
_SAID_CHARS: Final = 160


class MissingError(Exception):
    """A peer cannot be installed; the message is one sentence that says which and why."""


def default_directory() -> Path:
    """Return the default directory of peers, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "indilog-bench-peers"


def python_in(directory: Path) -> Path:
    """Return the interpreter of an environment that has the peers' Python packages.

    Raises:
        MissingError: the environment cannot be created.
    """
    environment = directory / "python"
    python, wanted = environment / "bin" / "python", _hash_of(_LOCK)
    if not _is_made(environment, wanted):
        _say(f"Installing the packages of {_LOCK.name} into {environment} ...")
        shutil.rmtree(environment, ignore_errors=True)
        _run("Python's venv", [sys.executable, "-m", "venv", str(environment)])
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run("pip", [str(python), *install, "--require-hashes", "-r", str(_LOCK)])
        _made(environment, wanted)
    return python


def npm_in(directory: Path) -> Path:
    """Return a folder whose `node_modules` has the peers' npm packages; errors as `python_in`."""
    folder, wanted = directory / "npm", _hash_of(_NPM / "package-lock.json")
    if not _is_made(folder, wanted):
        if shutil.which("npm") is None:
            raise MissingError("npm is missing; install it (Debian: apt-get install npm).")
        _say(f"Installing the packages of {_NPM.name} into {folder} ...")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(_NPM, folder)
        _run("npm", ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        _made(folder, wanted)
    return folder


def restate_server_in(directory: Path) -> Path:
    """Return Restate's server; errors as `python_in`."""
    packages = npm_in(directory) / "node_modules" / "@restatedev"
    found = sorted(packages.glob("restate-server-*/bin/restate-server"))
    if not found:
        raise MissingError("Restate's npm package has no server for this machine.")
    return found[0]


def node_in(directory: Path) -> Path:
    """Return the Node interpreter that the SDK asks for; errors as `python_in`."""
    found = sorted((npm_in(directory) / "node_modules").glob("node-linux-*/bin/node"))
    if not found:
        raise MissingError("npm has no Node interpreter for this machine.")
    return found[0]


def _run(what: str, command: Sequence[str], cwd: Path | None = None) -> None:
    environment = os.environ | {"SCARF_ANALYTICS": "false", "DO_NOT_TRACK": "1"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=INSTALL_S_MAX, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{what} did not finish: {error}"[:_SAID_CHARS]) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise MissingError(f"{what} failed: {' '.join(last)}"[:_SAID_CHARS])


def _hash_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _is_made(folder: Path, wanted: str) -> bool:
    stamp = folder / "made-from"
    return stamp.exists() and stamp.read_text() == wanted


def _made(folder: Path, wanted: str) -> None:
    (folder / "made-from").write_text(wanted)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def said(*command: str | Path) -> str:
    """Return the output of a program, for instance its version."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
