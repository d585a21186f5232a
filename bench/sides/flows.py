"""The sides of `bench.flow_peers`: each is started for its round, registered, called over HTTP, and
stopped; then its data is removed.

Restate runs in two configurations. One is its default: 24 partitions, and its SDK for Python under
Hypercorn with the production settings of its documentation. The other has 2 partitions, the fastest
number that was found on this machine with few cores. Each also runs with a service for Node. DBOS
runs on SQLite, its default, and on PostgreSQL, behind FastAPI and uvicorn. IndiLog is `indilog up`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import httpx

from bench.sides import flow_install
from bench.support import servers
from bench.support.harness import commit
from bench.support.http_caller import HttpCaller
from indilog.cli.start import PlatformLog, platform, run_step, wait_ready

OPERATIONS: Final = ("no-op", "counter", "hot counter", "5-step workflow", "queue round trip")
Ask: TypeAlias = Callable[[HttpCaller, int], Awaitable[bytes]]
"""One operation over a caller's connection, for the caller with that number."""

_APPS: Final = Path(__file__).with_name("flow_apps")
_REGISTER_S_MAX: Final = 60.0
_HYPERCORN: Final = """
bind = "127.0.0.1:{port}"
h2_max_concurrent_streams = 2147483647
keep_alive_max_requests = 2147483647
keep_alive_timeout = 2147483647
"""


class Served(NamedTuple):
    """A running side."""

    port: int
    operations: Mapping[str, Ask]
    version: str


@dataclass(frozen=True)
class FlowSide:
    """A side, and the durability of its answers."""

    promise: str
    serving: Callable[[Path], AbstractAsyncContextManager[Served]]
    """Runs the side, with peers from a directory."""
    starts_anew: bool = False
    """Whether the side is restarted for each operation, because unfinished work of one operation
    would slow the next one for minutes.
    """


def post(path: str, body: str = "1") -> Ask:
    """Return an operation that posts JSON; `{caller}` in path or body is the caller's number."""

    async def ask(caller: HttpCaller, number: int) -> bytes:
        return await caller.post(path.format(caller=number), body.format(caller=number).encode())

    return ask


# --- Restate


async def _send_and_await(caller: HttpCaller, _number: int) -> bytes:
    """Put a call into the queue of a handler, then wait for its result."""
    sent = json.loads(await caller.post("/bench/noop/send", b"1"))
    return await caller.get(f"/restate/invocation/{sent['invocationId']}/attach")


@asynccontextmanager
async def restate(peers: Path, *, partitions: int | None, on_node: bool) -> AsyncIterator[Served]:
    """Run Restate's server, and a service that is registered with it."""
    program = flow_install.restate_server_in(peers)
    ingress, admin, fabric, service = (servers.free_port() for _ in range(4))
    with servers.temporary("restate") as directory:
        environment = {
            "RESTATE_BASE_DIR": f"{directory}/data",
            "RESTATE_NODE_NAME": "bench",
            "RESTATE_BIND_IP": servers.HOST,
            "RESTATE_BIND_PORT": str(fabric),
            "RESTATE_INGRESS__BIND_PORT": str(ingress),
            "RESTATE_ADMIN__BIND_PORT": str(admin),
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_DISABLE_TELEMETRY": "true",
            "RESTATE_LOG_FILTER": "warn",
        }
        if partitions is not None:
            environment["RESTATE_DEFAULT_NUM_PARTITIONS"] = str(partitions)
        started = _node_service if on_node else _python_service
        with (
            servers.running([str(program)], ingress, directory, environment=environment),
            started(peers, directory, service),
        ):
            await _register(admin, service)
            yield Served(
                ingress,
                {
                    "no-op": post("/bench/noop"),
                    "counter": post("/counter/{caller}/increment"),
                    "hot counter": post("/counter/hot/increment"),
                    "5-step workflow": post("/bench/workflow"),
                    "queue round trip": _send_and_await,
                },
                flow_install.said(program, "--version").split()[-1],
            )


@contextmanager
def _python_service(peers: Path, directory: Path, port: int) -> Iterator[None]:
    settings = directory / "hypercorn.toml"
    settings.write_text(_HYPERCORN.format(port=port))
    python = flow_install.python_in(peers)
    command = [str(python), "-m", "hypercorn", "--config", str(settings), "restate_service:app"]
    with servers.running(command, port, directory, cwd=_APPS):
        yield


@contextmanager
def _node_service(peers: Path, directory: Path, port: int) -> Iterator[None]:
    command = [str(flow_install.node_in(peers)), str(_APPS / "restate_service.mjs"), str(port)]
    folder = flow_install.npm_in(peers)
    environment = {"NODE_ENV": "production", "RESTATE_LOGGING": "ERROR"}
    with servers.running(command, port, directory, cwd=folder, environment=environment):
        yield


async def _register(admin: int, service: int) -> None:
    """Register the service with the server, with retries until the server is ready."""
    url = f"http://{servers.HOST}:{admin}/deployments"
    body = {"uri": f"http://{servers.HOST}:{service}"}
    async with httpx.AsyncClient(timeout=_REGISTER_S_MAX, trust_env=False) as client:
        async with asyncio.timeout(_REGISTER_S_MAX):
            while True:
                try:
                    answer = await client.post(url, json=body)
                except httpx.TransportError:
                    await asyncio.sleep(0.2)
                    continue
                if answer.is_success:
                    return
                await asyncio.sleep(0.2)


# --- DBOS

_DBOS_VERSION: Final = "import importlib.metadata as m; print(m.version('dbos'))"


@asynccontextmanager
async def dbos(peers: Path, *, postgres: bool) -> AsyncIterator[Served]:
    """Run a service with DBOS, on SQLite or PostgreSQL."""
    python, port = flow_install.python_in(peers), servers.free_port()
    with servers.temporary("dbos") as directory, _database(directory, postgres=postgres) as url:
        command = [str(python), str(_APPS / "dbos_service.py"), str(port), url]
        with servers.running(command, port, directory):
            yield Served(
                port,
                {
                    "no-op": post("/noop"),
                    "counter": post("/counter/{caller}"),
                    "hot counter": post("/counter/hot"),
                    "5-step workflow": post("/workflow"),
                    "queue round trip": post("/queue"),
                },
                flow_install.said(python, "-c", _DBOS_VERSION),
            )


@contextmanager
def _database(directory: Path, *, postgres: bool) -> Iterator[str]:
    if not postgres:
        yield f"sqlite:///{directory}/dbos.sqlite"
        return
    with servers.postgres_server() as server:
        yield f"postgresql://bench@{servers.HOST}:{server.address['port']}/postgres"


# --- IndiLog


@asynccontextmanager
async def indilog(_peers: Path) -> AsyncIterator[Served]:
    """Run `indilog up` with the application deployed."""
    port = servers.free_port()
    url = f"http://{servers.HOST}:{port}"
    with servers.temporary("platform") as directory:
        data = directory / "data"
        log = PlatformLog(data)
        with platform(log, data, port) as process:
            await asyncio.to_thread(wait_ready, process, url, log)
            app = str(_APPS / "indilog_app.py")
            run_step("Deploying", "indilog", "deploy", app, "--name", "bench", "--url", url)
            yield Served(
                port,
                {
                    "no-op": post("/functions/bench/noop", '{{"number": 1}}'),
                    "counter": post("/functions/bench/increment", '{{"name": "{caller}"}}'),
                    "hot counter": post("/functions/bench/increment", '{{"name": "hot"}}'),
                    "5-step workflow": post("/functions/bench/five_steps", '{{"number": 1}}'),
                    "queue round trip": post("/functions/bench/round_trip", '{{"number": 1}}'),
                },
                commit(),
            )


_RESTATE: Final = "every write synced (its log's RocksDB, fsync of the WAL)"
SIDES: Final[Mapping[str, FlowSide]] = {
    "Restate, as shipped": FlowSide(_RESTATE, partial(restate, partitions=None, on_node=False)),
    "Restate, as shipped, Node": FlowSide(
        _RESTATE, partial(restate, partitions=None, on_node=True)
    ),
    "Restate, 2 partitions": FlowSide(_RESTATE, partial(restate, partitions=2, on_node=False)),
    "Restate, 2 partitions, Node": FlowSide(_RESTATE, partial(restate, partitions=2, on_node=True)),
    "DBOS on SQLite": FlowSide(
        "every commit synced (synchronous=FULL)", partial(dbos, postgres=False), starts_anew=True
    ),
    "DBOS on PostgreSQL": FlowSide(
        "every commit synced (synchronous_commit)", partial(dbos, postgres=True)
    ),
    "IndiLog": FlowSide("every write synced", indilog),
}
