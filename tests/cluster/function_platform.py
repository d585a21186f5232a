"""A platform with functions, for tests: worker processes, a gateway, an HTTP client, and an
application with functions that tests call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from indilog.base.log import LogSource
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import embedded
from indilog_compute.gateway import GatewayServer, create_gateway, guard_unix_socket
from indilog_compute.workers.host import FunctionHost

DEMO = """
import os, asyncio, subprocess, time
import indilog

app = indilog.App("demo")

@app.function
async def count(ctx: indilog.Context, name: str) -> int:
    log = ctx.log("counts")
    await log.append(b"1", tags=[name])
    return len(await log.read_range(name))

@app.function
async def follow_two(ctx: indilog.Context, user: str) -> list[int]:
    return [await ctx.call("social.follow", user=user, other=o) for o in ("x", "y")]

@app.function
async def fan_out(ctx: indilog.Context, width: int) -> list[int]:
    return await ctx.map(sync_child, [{"n": n} for n in range(width)])

@app.function
def sync_child(ctx: indilog.Context, n: int) -> int:
    ctx.wait(ctx.log("children").append(b"%d" % n))
    return n

@app.function
async def writes_in_child(ctx: indilog.Context) -> list[str]:
    await ctx.call(sync_child, n=5)
    return [r.data.decode() for r in await ctx.log("children").read_range()]

@app.function
async def crash(ctx: indilog.Context) -> None:
    await ctx.log("crashes").append(b"x")
    os._exit(3)

@app.function
async def wait_for_release(ctx: indilog.Context) -> str:
    await ctx.log("gate").append(b"here", tags=["here"])
    record = await ctx.log("gate").read_next("release", wait=60)
    return record.data.decode() + VERSION

@app.function
async def recurse(ctx: indilog.Context, n: int) -> int:
    return await ctx.call(recurse, n=n + 1)

@app.function(timeout_s=0.05)
async def slow() -> None:
    await asyncio.sleep(60)

@app.function
async def prints() -> int:
    print("spoken")
    return 1

@app.function(timeout_s=5)
async def blocks_loop(ctx: indilog.Context) -> None:
    await ctx.log("gate").append(b"here", tags=["here"])
    while True: pass

@app.function(timeout_s=5)
def blocks_thread(ctx: indilog.Context) -> None:
    ctx.wait(ctx.log("gate").append(b"here", tags=["here"]))
    while True: time.sleep(0.01)

@app.function
async def leaves_children(ctx: indilog.Context) -> None:
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    await ctx.log("children").append(b"%d" % child.pid)
    os._exit(3)

@app.function
async def gathers() -> None:
    async def child() -> None:
        raise SystemExit(3)
    await asyncio.gather(child())

VERSION = " by version 1"
"""


class Platform:
    """A compute node on an embedded platform, and a client over HTTP."""

    def __init__(self, host: FunctionHost, url: str, http: httpx.AsyncClient) -> None:
        self.host = host
        self.url = url
        self.http = http

    async def deploy(self, app: str, source: str) -> httpx.Response:
        headers = {"content-type": "text/x-python"}
        return await self.http.put(f"/apps/{app}", content=source, headers=headers)

    async def call(self, name: str, /, **arguments: object) -> httpx.Response:
        return await self.http.post(f"/functions/{name.replace('.', '/')}", json=arguments)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that is not announced."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def config_in(directory: Path, *, engines: int = 1, **node: Any) -> Config:  # noqa: ANN401
    """Return a configuration for tests; `node` are the settings that differ."""
    own: dict[str, Any] = {
        "data_dir": directory,
        "port": 0,
        "segment_bytes": 8 * MIB,
        "worker_silent_s": 30.0,  # on a busy machine a healthy worker is silent, too
        "worker_stop_s": 30.0,
    }
    cluster = ClusterConfig(durability="memory", engines=engines)
    return Config(cluster=cluster, node=node_config(**(own | node)))


@asynccontextmanager
async def running(directory: Path, **node: Any) -> AsyncIterator[Platform]:  # noqa: ANN401
    """Run a platform with one compute node; `node` are its settings."""
    config = config_in(directory, **node)
    async with embedded(config) as there, served(config, there.logs) as platform:
        yield platform


@asynccontextmanager
async def running_two(directory: Path) -> AsyncIterator[tuple[Platform, Platform]]:
    """Run a platform with two compute nodes."""
    async with embedded(config_in(directory, engines=2)) as there:
        one, two = there.engines.values()
        async with (
            served(config_in(directory / "one", workers=1), one) as first,
            served(config_in(directory / "two", workers=1), two) as second,
        ):
            yield first, second


@asynccontextmanager
async def served(config: Config, logs: LogSource) -> AsyncIterator[Platform]:
    """Run the functions and the gateway of one compute node."""
    host = FunctionHost(config, logs)
    gateway = create_gateway(host, logs, lambda: {"ready": True}, config)
    app = guard_unix_socket(gateway, host, config.node)  # all rules but the token
    server = GatewayServer(app, config.node.gateway.host, 0, resources=gateway.resources)
    await host.start()
    try:
        await server.start()
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=150, trust_env=False) as http:
            yield Platform(host, url, http)
    finally:
        await server.stop()
        await host.stop()
