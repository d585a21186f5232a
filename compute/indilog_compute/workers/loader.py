"""Imports deployed sources in a worker. Each deployment gets its own package, so that several
versions can be loaded. `WorkerRunner` calls `load`.

The sources are written to a private directory, and are imported under a package name that no other
deployment has. Deployed code may still import its own modules absolutely, as on its author's
machine (`import graph`, `from social import objects`). For this, the modules of the deployment have
their own `__import__`, which looks up names in the deployment first.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Final

from indilog.apps.app import App, Function, check_app_name
from indilog.base.deployed import FunctionSpec, code_digest
from indilog.base.errors import DeployError, DiskFullError, InvalidArgumentsError
from indilog.base.room_reserve import NO_ROOM

PACKAGE: Final = "indilog_deployed_"
"""Prefix of the package names of deployments."""
_ENTRIES: Final = ("__init__", "app", "main")
_NOT_IMPORTED: Final = ("__main__", "conftest", "setup")


class LoadedDeployment:
    """A deployment that is imported in this process.

    Attributes:
        app: the application that the sources define.
        functions: the functions and operations by name; only the names of operations have dots.
        code: digest of the sources.
    """

    def __init__(self, app: App, package: str, directory: Path, code: str = "") -> None:
        self.app = app
        self.code = code
        self.functions: dict[str, Function] = {**app.functions, **app.operations}
        self._package = package
        self._directory = directory

    def specs(self) -> tuple[FunctionSpec, ...]:
        """Return the public descriptions of the functions."""
        return tuple(map(_spec, self.app.functions.values()))

    def operation_specs(self) -> tuple[FunctionSpec, ...]:
        """Return the public descriptions of the operations."""
        return tuple(map(_spec, self.app.operations.values()))

    def place(self, error: BaseException) -> str | None:
        """Return the line of deployed code that raised an error, such as `social.py, line 12`;
        None: deployed code did not raise it.
        """
        return _place_of(error, self._package)

    def with_author_names(self, text: str) -> str:
        """Return `text` with the names that files and modules have in the deployed sources."""
        return with_author_names(text, self._package)

    def unload(self) -> None:
        """Remove the modules and files of the deployment. Running calls keep the objects that they
        use.
        """
        _forget(self._package, self._directory)


def load(
    deployment: int, name: str | None, sources: Mapping[str, str], directory: Path
) -> LoadedDeployment:
    """Import `sources` (relative path → text) and return the application in them.

    If `name` is None, the application keeps the name in its code. If the deployment cannot be
    loaded, its modules and files are removed.

    Raises:
        DeployError: the deployment cannot be loaded, for one of these reasons. A path lies outside
            the deployment. The code does not import (the message has file and line). The code
            defines no application, or several. The type hints of a function are unusable.
        DiskFullError: there is no disk space left for the sources.
    """
    package = f"{PACKAGE}{deployment}"
    home = directory / package
    finder = _Finder(package, home, _own_names(sources))
    sys.meta_path.insert(0, finder)
    try:
        _write(home, sources)
        app = _import_app(package, sources)
        if name is not None:
            app.name = check_app_name(name)
        check_app(app)
    except BaseException:
        sys.meta_path.remove(finder)
        _forget(package, home)
        raise
    return LoadedDeployment(app, package, home, code_digest(sources))


# --- importing sources


def _write(home: Path, sources: Mapping[str, str]) -> None:
    if not any(path.endswith(".py") for path in sources):
        raise DeployError("The deployed sources contain no Python file.")
    for path, text in sources.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
            raise DeployError(f"{path!r} is not a path inside an application.")
        target = home.joinpath(*parts)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        except (OSError, UnicodeEncodeError) as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise DiskFullError(
                    f"There is no disk space left to write {path!r}; make room, then deploy it "
                    "again."
                ) from error
            raise DeployError(f"{path!r} cannot be written: {error}.") from error


def _own_names(sources: Mapping[str, str]) -> frozenset[str]:
    """Return the top-level modules of a deployment, which its modules may import absolutely."""
    return frozenset(
        PurePosixPath(path).parts[0].removesuffix(".py")
        for path in sources
        if path.endswith(".py") and path != "__init__.py"
    )


def _import_app(package: str, sources: Mapping[str, str]) -> App:
    found: list[App] = []
    for module in _import_order(sources):
        _import(package, module)
        if found := _apps(package):
            break
    # An application that has only workflows has operations, but no functions.
    found = found or [app for app in _found(package) if app.operations]
    if found:
        app = _only(found)
        _check_no_other(app, package, sources)
        return app
    if empty := [app.name for app in _found(package) if not app.functions]:
        raise DeployError(
            f"App {empty[0]} has no functions; decorate at least one with @app.function."
        )
    raise DeployError(
        "The code defines no application; write app = indilog.App(...) and decorate functions "
        "with @app.function."
    )


def _import_order(sources: Mapping[str, str]) -> list[str]:
    """Return the modules in the order in which they are imported. Modules that probably define the
    application come first.
    """
    modules = sorted(
        ".".join(PurePosixPath(path).with_suffix("").parts)
        for path in sources
        if path.endswith(".py")
    )

    def place(module: str) -> tuple[int, int]:
        last = module.rpartition(".")[2]
        return module.count("."), _ENTRIES.index(last) if last in _ENTRIES else len(_ENTRIES)

    wanted = [m for m in modules if m.rpartition(".")[2] not in _NOT_IMPORTED]
    packages = [m.removesuffix(".__init__") for m in sorted(wanted, key=place)]
    return [m for m in packages if not m.rpartition(".")[2].startswith("test_")]


def _import(package: str, module: str) -> None:
    full = package if module == "__init__" else f"{package}.{module}"
    try:
        importlib.import_module(package)
        importlib.import_module(full)
    except BaseException as error:  # user code may raise any exception, even KeyboardInterrupt
        raise DeployError(_sentence(error, package)) from error


def _sentence(error: BaseException, package: str) -> str:
    """Return a sentence with the file, line and reason of a failed import."""
    description = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")
    description = with_author_names(description, package)
    if isinstance(error, SyntaxError) and error.filename:
        file = _place(error.filename, package)
        return f"{file}, line {error.lineno}: {type(error).__name__}: {error.msg}."
    place = _place_of(error, package)
    return f"{place or 'The code does not import'}: {description}."


def _place_of(error: BaseException, package: str) -> str | None:
    """Return the innermost line of deployed code in the traceback of `error`; None: the traceback
    has no such line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"/{package}/" in f.filename]
    return f"{_place(own[-1].filename, package)}, line {own[-1].lineno}" if own else None


def _place(filename: str, package: str) -> str:
    return filename.partition(f"/{package}/")[2] or filename


def with_author_names(text: str, package: str) -> str:
    """Return `text` with the names that files and modules have in the deployed sources: without the
    directory and the package prefix that the deployment has in this process.
    """
    return re.sub(rf"[^\s'\"(]*/{package}/", "", text).replace(f"{package}.", "")


def _found(package: str) -> list[App]:
    modules = [m for name, m in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    found = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, App)}
    return list(found.values())


def _apps(package: str) -> list[App]:
    return [
        app
        for app in _found(package)
        if any(_is_own(function, package) for function in app.functions.values())
    ]


def _is_own(function: Function, package: str) -> bool:
    return f"{function.body.__module__}.".startswith(f"{package}.")


def _only(found: list[App]) -> App:
    if len(found) > 1:
        names = ", ".join(sorted(app.name for app in found))
        raise DeployError(f"The code defines {len(found)} applications ({names}); deploy each one.")
    return found[0]


def _check_no_other(app: App, package: str, sources: Mapping[str, str]) -> None:
    """Check that the modules that were not imported define no further application. Otherwise such
    an application would silently not be deployed.

    Raises:
        DeployError: a module defines another application.
    """
    for module in _import_order(sources):
        path = f"{module.replace('.', '/')}.py"
        if f"{package}.{module}" in sys.modules or path not in sources:
            continue
        if (line := _makes_app(sources[path])) is not None:
            raise DeployError(
                f"The code defines another application than {app.name}: {path}, line {line}; "
                "deploy each one from a file or folder of its own."
            )


def _makes_app(text: str) -> int | None:
    """Return the line at which a module first creates an `App` at its top level; None: the module
    creates no `App`.
    """
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func) in {"App", "indilog.App"}:
            return statement.lineno
    return None


def check_app(app: App) -> None:
    """Check the signatures and schedules of an application whose code was imported.

    Raises:
        DeployError: a function's type hints are unusable, or a schedule's function needs arguments.
    """
    for function in (*app.functions.values(), *app.operations.values()):
        try:
            function.signature  # noqa: B018 - computed now, so that a wrong signature fails the deployment
        except TypeError as error:
            raise DeployError(str(error)) from error
    for schedule in app.schedules:
        try:
            app.functions[schedule.function].signature.arguments(b"{}")
        except InvalidArgumentsError as error:
            missing = ", ".join(fault["field"] for fault in error.errors)
            raise DeployError(
                f"{app.name}.{schedule.function} is called by a schedule, without arguments; give "
                f"{missing} a default."
            ) from error


def _spec(function: Function) -> FunctionSpec:
    return FunctionSpec(
        name=function.name,
        doc=function.doc,
        arguments=function.signature.arguments_schema,
        result=function.signature.result_schema,
        timeout_s=function.timeout_s,
        is_async=function.is_async,
        public=function.public,
    )


def _forget(package: str, directory: Path) -> None:
    for name in [n for n in list(sys.modules) if f"{n}.".startswith(f"{package}.")]:
        del sys.modules[name]
    sys.meta_path[:] = [
        f for f in sys.meta_path if not (isinstance(f, _Finder) and f.package == package)
    ]
    shutil.rmtree(directory, ignore_errors=True)


# --- Python's import machinery, for one deployment


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of one deployment only."""

    def __init__(self, package: str, home: Path, own_names: frozenset[str]) -> None:
        self.package = package
        self._home = home
        self._own_names = own_names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - Python's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the deployment; None for every other module."""
        if not f"{fullname}.".startswith(f"{self.package}."):
            return None
        place = self._home.joinpath(*fullname.split(".")[1:])
        init, single = place / "__init__.py", place.with_suffix(".py")
        if place == self._home or (place.is_dir() and (init.exists() or not single.exists())):
            return self._package_spec(fullname, place, init)
        if not single.exists():
            return None
        loader = _Loader(fullname, str(single), self)
        return importlib.util.spec_from_file_location(fullname, single, loader=loader)

    def _package_spec(
        self, fullname: str, place: Path, init: Path
    ) -> importlib.machinery.ModuleSpec | None:
        if not place.is_dir():
            return None
        if init.exists():
            return importlib.util.spec_from_file_location(
                fullname,
                init,
                loader=_Loader(fullname, str(init), self),
                submodule_search_locations=[str(place)],
            )
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    def own(self, name: str) -> str | None:
        """Return the full name of module `name`; None: the deployment has no such module."""
        if name.partition(".")[0] not in self._own_names:
            return None
        return f"{self.package}.{name}"


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module with an `__import__` that looks in the deployment first."""

    def __init__(self, fullname: str, path: str, finder: _Finder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        scoped = dict(vars(builtins))
        scoped["__import__"] = self._import
        module.__dict__["__builtins__"] = scoped
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals_: Mapping[str, Any] | None = None,
        locals_: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        own = self._finder.own(name) if level == 0 else None
        if own is None:
            return builtins.__import__(name, globals_, locals_, fromlist or (), level)
        module = importlib.import_module(own)
        if not fromlist:
            return sys.modules[f"{self._finder.package}.{name.partition('.')[0]}"]
        for attribute in fromlist:
            if attribute != "*" and not hasattr(module, attribute) and hasattr(module, "__path__"):
                importlib.import_module(f"{own}.{attribute}")
        return module
