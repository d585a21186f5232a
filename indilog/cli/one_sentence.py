"""Reports wrong arguments of a command in one sentence, with exit code 2 (API.md, "Command line").
By default, the framework prints a box of several lines.

`indilog` and `./start` are commands of these classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class OneSentenceGroup(TyperGroup):
    """A group of commands that reports wrong use in one sentence."""

    def main(self, *given: Any, **more: Any) -> Any:  # noqa: ANN401 - the framework's
        """Run the command that the arguments name, and end the process."""
        return _run_in_one_sentence(super().main, *given, **more)


class OneSentenceCommand(TyperCommand):
    """A command that reports wrong use in one sentence."""

    def main(self, *given: Any, **more: Any) -> Any:  # noqa: ANN401 - the framework's
        """Run the command, and end the process."""
        return _run_in_one_sentence(super().main, *given, **more)


def _run_in_one_sentence(main: Callable[..., Any], *given: Any, **more: Any) -> Any:  # noqa: ANN401 - the framework's
    if not more.pop("standalone_mode", True):
        return main(*given, standalone_mode=False, **more)
    try:
        sys.exit(main(*given, standalone_mode=False, **more))
    except typer.TyperException as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # the help is printed already
            sys.stderr.write(f"{_sentence(error)}\n")
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)


def _sentence(error: typer.TyperException) -> str:
    """Return what is wrong, and which command shows the right usage."""
    text = " ".join(error.format_message().split())
    if text.endswith("?"):  # the text suggests a similar name
        return text
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "indilog"
    return f"{text.removesuffix('.')}; see `{command} --help`."
