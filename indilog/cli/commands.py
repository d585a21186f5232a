"""The commands `up`, `node`, `down`, `token`, `open`, `deploy`, `undeploy`, `invoke`, `apps` and
`status`. The other commands have modules of their own, and are added to the group here.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from time import sleep
from typing import Annotated

import typer

from indilog import __version__
from indilog.apps.sources import sources_of, with_missing_file
from indilog.base.slim_imports import import_structlog
from indilog.cli import show
from indilog.cli.arguments import ARGUMENTS_HELP, arguments_in
from indilog.cli.backup import backup
from indilog.cli.cluster import cluster
from indilog.cli.gateway import DEFAULT, Gateway, Url, explain_mistakes, stop
from indilog.cli.invocations import invocations
from indilog.cli.logs import logs
from indilog.cli.mirror import mirror
from indilog.cli.one_sentence import OneSentenceGroup
from indilog.cli.pipeline import analyse, export
from indilog.cli.rebuild_index import rebuild_index
from indilog.cli.runs import runs
from indilog.cli.schedules import schedules
from indilog.link.access import reach, segment
from indilog.sdk.runs import CHECK_RUNS

app = typer.Typer(
    name="indilog",
    cls=OneSentenceGroup,
    help="Stateful serverless functions on a shared log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(logs, name="log")
app.add_typer(invocations, name="invocation")
app.add_typer(runs, name="runs")
app.add_typer(schedules, name="schedules")
app.add_typer(cluster, name="cluster")
app.add_typer(backup, name="backup")
app.command(name="rebuild-index")(rebuild_index)
app.command()(analyse)
app.command()(export)
app.command()(mirror)
_WATCH_S = 0.5
_RUNS_NAMED = 3
"""Runs that `deploy` names if the new code does not continue them."""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - the framework calls it
    if wanted:
        show.line(f"indilog {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Stateful serverless functions on a shared log."""


def run() -> None:
    """Run the command that the arguments name."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def up(
    *,
    data: Annotated[Path | None, typer.Option(help="Where records are kept.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 takes a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with all settings.")] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="One process per node, instead of one for all.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="A cluster of so many processes on this machine, each with all roles; 3 survive "
            "the loss of any one."
        ),
    ] = None,
    zones: Annotated[
        str | None,
        typer.Option(
            help="With --nodes: zones such as east,west, which the processes get in turn."
        ),
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port for gRPC; 0 takes a free one. Default: no gRPC.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate for https:// (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="No token: every process on this machine gets full access."),
    ] = False,
    supervisor_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a platform until Ctrl-C."""
    import_structlog()
    from indilog.config import config_from

    node = {"data_dir": data, "port": port, "host": host, "tls_cert": tls_cert, "tls_key": tls_key}
    more = {"zone": zones, "grpc_port": grpc_port, "auth": False if no_auth else None}
    overrides = {"node": {**node, **more}}
    with explain_mistakes():
        configured = config_from(config, os.environ, overrides)
        _configure_logging()
        if processes and nodes is not None:
            stop("Choose one of --processes and --nodes.")
        if processes or nodes is not None or configured.cluster.shared_processes:
            from indilog.runtime.cluster.supervisor import processes_config, run_processes

            cluster = processes_config(config, os.environ, overrides, shared=nodes)
            run_processes(cluster, _say_ready, supervisor_fd=supervisor_fd)
        elif zones is not None:
            stop("--zones needs --nodes: one process has no replicas to keep apart.")
        else:
            from indilog.runtime.cluster.assembly import run_embedded

            run_embedded(configured, _say_ready, supervisor_fd=supervisor_fd)


@app.command()
def node(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file; its table `cluster` is the same on all machines."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where records are kept.")] = None,
    roles: Annotated[
        str,
        typer.Option(help="What a machine does that joins later; the first ones have all roles."),
    ] = "sequencer,storage,index,aggregator,compute",
) -> None:
    """Run this machine's process of a cluster on several machines, until Ctrl-C.

    Give the same command on each machine. ZooKeeper tells them of each other.
    """
    import_structlog()
    from indilog.config import config_from
    from indilog.runtime.cluster.machines.machine_process import roles_named, run_machine
    from indilog.runtime.cluster.supervisor import processes_config

    overrides = {"node": {"data_dir": data}}
    with explain_mistakes():
        kinds = roles_named(roles)
        count = config_from(config, os.environ, overrides).cluster.shared_processes
        configured = processes_config(config, os.environ, overrides, shared=count or None)
        _configure_logging()
        run_machine(configured, kinds, _say_serving)


def _configure_logging() -> None:
    from indilog.base.telemetry import configure_logging

    configure_logging("console" if sys.stderr.isatty() else "json")


def _say_serving(name: str, url: str) -> None:
    show.line(f"{name} is up{f' on {url}' if url else ''}. Ctrl-C stops it.")


@app.command()
def down(
    *,
    data: Annotated[Path | None, typer.Option(help="Where records are kept.")] = None,
) -> None:
    """Stop the processes of `up --processes` whose supervisor was killed."""
    import_structlog()
    from indilog.config import config_from
    from indilog.runtime.cluster.supervisor import stop_processes

    with explain_mistakes():
        configured = config_from(None, os.environ, {"node": {"data_dir": data}})
        _configure_logging()
        stopped = stop_processes(configured.node)
    show.line(f"Stopped {stopped} processes." if stopped else "No process was running.")


def _say_ready(url: str) -> None:
    at = "" if url == DEFAULT else f" --url {url}"
    show.line(f"IndiLog is up on {url} (in a browser: `indilog open{at}`). Ctrl-C stops it.")


@app.command()
def token(*, url: Url = DEFAULT) -> None:
    """Print the token of a platform that you run, for the header `Authorization: Bearer TOKEN`."""
    with explain_mistakes():
        endpoint = reach(url)
    if not endpoint.token:
        stop(
            f"No token is known for {url}: you run no platform with a token there on this "
            "machine. Elsewhere the token is in the file `token` of the data directory."
        )
    show.line(endpoint.token)


@app.command(name="open")
def open_(*, url: Url = DEFAULT) -> None:
    """Print a link that signs a browser in once, and open it if there is a screen."""
    import webbrowser

    gateway = Gateway(url)
    link = gateway.url + gateway.post("/session/codes")["path"]
    show.line(link)
    if any(os.environ.get(screen) for screen in ("DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(link)


@app.command()
def deploy(
    what: Annotated[Path, typer.Argument(help="A Python file, a package or a folder.")],
    *,
    name: Annotated[
        str | None, typer.Option(help="Deploy under this name, not the one in the code.")
    ] = None,
    owner: Annotated[str, typer.Option(help="The application's owner.")] = "local",
    watch: Annotated[
        bool, typer.Option("--watch", help="Deploy again whenever a file changes.")
    ] = False,
    url: Url = DEFAULT,
) -> None:
    """Deploy an application; deploying again replaces it, atomically."""
    gateway = Gateway(url)
    try:
        _deploy(gateway, what, name, owner)
    except typer.Exit:
        if not watch:
            raise
    while watch:
        _wait_for_change(what)
        try:
            _deploy(gateway, what, name, owner)
        except typer.Exit:
            continue  # the cause was printed; the previous version continues


def _deploy(gateway: Gateway, what: Path, name: str | None, owner: str) -> None:
    from indilog.apps.app import check_app_name

    with explain_mistakes():
        if name is not None:
            check_app_name(name)
        sources = sources_of(what)
    body, headers = {"sources": sources}, {"Indilog-Owner": owner}
    gateway.explain = partial(with_missing_file, what)
    if name is None:
        deployed = gateway.post("/apps", json=body, headers=headers)
    else:
        deployed = gateway.put(f"/apps/{name}", json=body, headers=headers)
    functions = f": {', '.join(deployed['functions'])}" if deployed["functions"] else ""
    show.line(f"Deployed {deployed['name']}, version {deployed['version']}{functions}.")
    if deployed.get("has_runs"):
        _say_parked(gateway, deployed["name"])


def _say_parked(gateway: Gateway, name: str) -> None:
    """Say how many open runs the new code does not continue, if the application says it soon."""
    found = gateway.try_post(f"/operations/{segment(name)}/{CHECK_RUNS}", json={})
    if found is None or not found["mismatches"]:
        return
    count = len(found["mismatches"])
    more = "" if found["is_whole"] else " or more"
    ids = ", ".join(repr(run["id"]) for run in found["mismatches"][:_RUNS_NAMED])
    show.line(
        f"{count:,}{more} runs of {name} do not continue with this code, so they are parked: {ids}"
        f"{', ...' if count > _RUNS_NAMED else ''}. `indilog runs show ID` says why."
    )


@app.command()
def undeploy(
    name: Annotated[str, typer.Argument(help="The application's name.", metavar="APP")],
    *,
    owner: Annotated[str, typer.Option(help="The application's owner.")] = "local",
    url: Url = DEFAULT,
) -> None:
    """Remove an application. Its logs stay; if it is deployed again, it continues with them."""
    from indilog.apps.app import check_app_name

    with explain_mistakes():
        check_app_name(name)
    gone = Gateway(url).delete(f"/apps/{name}", headers={"Indilog-Owner": owner})
    show.line(f"Undeployed {gone['name']}, version {gone['version']}; its logs stay.")
    if left := gone.get("invocations_open"):
        show.line(
            f"{left:,} recorded invocations are open; each fails when it is due, unless the "
            "application is deployed again by then. `indilog invocation cancel ID` ends one."
        )


def _wait_for_change(what: Path) -> None:
    before = _stamps(what)
    while _stamps(what) == before:
        sleep(_WATCH_S)


def _stamps(what: Path) -> dict[Path, int]:
    files = [what] if what.is_file() else sorted(what.rglob("*.py"))
    try:
        return {file: file.stat().st_mtime_ns for file in files}
    except FileNotFoundError:  # an editor is replacing the file
        return {}


@app.command()
def invoke(
    function: Annotated[str, typer.Argument(help="app.function")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help=ARGUMENTS_HELP),
    ] = None,
    *,
    json_text: Annotated[
        str | None, typer.Option("--json", help="All arguments as a JSON object.")
    ] = None,
    in_background: Annotated[
        bool,
        typer.Option(
            "--async", help="Do not wait; print the id, for `indilog invocation show ID`."
        ),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: calls with the same key run once, with one result."),
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Call a function and print its result."""
    with explain_mistakes():
        given = arguments_in(arguments or [], json_text)
    named, dot, rest = function.partition(".")
    if not dot or not rest or "/" in function:
        stop(f"A function is named app.function, not {function!r}.")
    query: dict[str, object] = {"async": True} if in_background else {}
    headers = {"idempotency-key": key} if key is not None else None
    path = f"/functions/{named}/{rest}"
    result = Gateway(url).post(path, json=given, query=query, headers=headers)
    show.value(result["invocation"] if in_background else result)


@app.command()
def apps(*, url: Url = DEFAULT) -> None:
    """List the deployed applications and their functions."""
    show.apps(Gateway(url).get_with("apps", "/apps")["apps"])


@app.command()
def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Show tiers, tails, the local index, functions and workers."""
    status = Gateway(url).get_with("ready", "/status")
    if as_json:
        show.value(status)
    else:
        show.status(status)
