"""The gRPC server as its clients see it: access, errors, limits, and a client in another language.

The contract suite (`tests/contract`, kind "gRPC") has the guarantees of the log.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from indilog.base.errors import InvalidArgumentsError, TooLargeError, TrimmedError, WrongStateError
from indilog.base.log import Session
from indilog.config import ClusterConfig
from indilog.link.access import reach
from indilog.remote_client import connect
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from tests.cluster.platform_process import ROOT, PlatformProcess, platform
from tests.grpc.log import GrpcLogs, error_of, grpc_address

pytestmark = [pytest.mark.asyncio, pytest.mark.cluster]
PROTO = ROOT / "compute/indilog_compute/gateway/rpc/indilog_v1.proto"
ADDER = """
import indilog
app = indilog.App("adder")

@app.function
async def add(ctx: indilog.Context, left: int, right: int) -> int:
    await ctx.log("sums").append(b"%d" % (left + right))
    return left + right

@app.function
async def fail(ctx: indilog.Context) -> None:
    raise ValueError("on purpose")
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    directory = tmp_path_factory.mktemp("grpc")
    with platform(directory, "--grpc-port", "0") as started:
        yield started


@pytest_asyncio.fixture
async def channel(running: PlatformProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(grpc_address(running.url)[0]) as opened:
        yield opened


@pytest.fixture
def logs(running: PlatformProcess, channel: grpc.aio.Channel) -> GrpcLogs:
    return GrpcLogs(channel, grpc_address(running.url)[1])


async def ask_invoke(
    running: PlatformProcess, channel: grpc.aio.Channel, request: pb.InvokeRequest
) -> pb.InvokeResponse:
    call = channel.unary_unary(
        "/indilog.v1.InvokeService/Invoke",
        request_serializer=pb.InvokeRequest.SerializeToString,
        response_deserializer=pb.InvokeResponse.FromString,
    )
    token = grpc_address(running.url)[1]
    try:
        answer: pb.InvokeResponse = await call(
            request, metadata=(("authorization", f"Bearer {token}"),)
        )
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
    return answer


async def deploy(running: PlatformProcess) -> None:
    async with connect(running.url) as client:
        await client.deploy({"adder.py": ADDER})


async def ran(command: list[str], folder: Path) -> str:
    """Run a program to its end, and return its output."""
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("token", ["", "wrong", "0" * 64])
async def test_a_caller_without_the_token_is_refused(channel: grpc.aio.Channel, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await GrpcLogs(channel, token).log("work", Session()).tail()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "indilog token" in (refused.value.details() or "")


async def test_health_and_reflection_need_no_token(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="indilog.v1.LogService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_describes_the_services(running: PlatformProcess) -> None:
    with grpc.insecure_channel(grpc_address(running.url)[0]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert {"indilog.v1.LogService", "indilog.v1.InvokeService"} <= services
        file = database.FindFileContainingSymbol("indilog.v1.LogService")
        assert "AppendRequest" in {message.name for message in file.message_type}


async def test_errors_have_a_code_and_the_details_of_the_platform(logs: GrpcLogs) -> None:
    log = logs.log("errors", Session())
    seqnum = await log.append(b"x")
    await log.append(b"y")
    await log.trim(seqnum + 1)
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_next(None, 0)
    assert trimmed.value.first_seqnum == seqnum + 1
    assert isinstance(trimmed.value.__cause__, grpc.aio.AioRpcError)
    assert trimmed.value.__cause__.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_a_position_of_another_log_is_refused_at_once(logs: GrpcLogs) -> None:
    with pytest.raises(InvalidArgumentsError, match="is it another log's"):
        await logs.log("work", Session(10**15)).read_next()


async def test_a_record_above_the_limit_is_refused_and_the_connection_survives(
    logs: GrpcLogs,
) -> None:
    log = logs.log("large", Session())
    data = b"x" * (ClusterConfig().record_bytes_max + 1)
    with pytest.raises(TooLargeError, match="limit is"):
        await logs.ask("Append", pb.AppendRequest(log="large", data=data), pb.AppendResponse)
    data = b"x" * (ClusterConfig().message_bytes_max + 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await logs.ask("Append", pb.AppendRequest(log="large", data=data), pb.AppendResponse)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await log.read_next() is None


async def test_a_tag_without_content_is_refused(logs: GrpcLogs) -> None:
    request = pb.AppendRequest(log="work", data=b"x", tags=[pb.Tag()])
    with pytest.raises(Exception, match="neither text nor a number"):
        await logs.ask("Append", request, pb.AppendResponse)


async def test_an_append_tells_its_shard_and_refuses_another_one(logs: GrpcLogs) -> None:
    log = logs.log("sharded", Session())
    request = pb.LiveShardRequest(log="sharded")
    shard = (await logs.ask("LiveShard", request, pb.LiveShardResponse)).shard
    for wanted in (None, shard):
        append = pb.AppendToShardRequest(log="sharded", data=b"here", shard=wanted)
        placed = await logs.ask("AppendToShard", append, pb.AppendToShardResponse)
        assert placed.shard == shard
        record = await log.read(placed.seqnum, fresh=True)
        assert record is not None
        assert record.data == b"here"
    other = pb.AppendToShardRequest(log="sharded", data=b"there", shard=shard + 1)
    with pytest.raises(WrongStateError, match="nothing was appended"):
        await logs.ask("AppendToShard", other, pb.AppendToShardResponse)
    assert [record.data for record in await log.read_range(fresh=True)] == [b"here"] * 2


async def test_a_subscription_ends_with_its_client(logs: GrpcLogs) -> None:
    log = logs.log("streamed", Session())
    for number in range(5):
        await log.append(b"%d" % number)
    found = []
    async for record in log.subscribe():
        found.append(record.data)
        if len(found) == 5:
            await log.append(b"live")
        if len(found) == 6:
            break
    assert found == [b"0", b"1", b"2", b"3", b"4", b"live"]


async def test_functions_are_called_in_the_callers_session(
    running: PlatformProcess, channel: grpc.aio.Channel, logs: GrpcLogs
) -> None:
    await deploy(running)
    request = pb.InvokeRequest(function="adder.add", arguments=b'{"left": 2, "right": 3}')
    answer = await ask_invoke(running, channel, request)
    assert answer.result == b"5"
    record = await logs.log("sums", Session(answer.position)).read_prev()
    assert record is not None
    assert record.data == b"5"


async def test_a_call_with_a_key_runs_once(
    running: PlatformProcess, channel: grpc.aio.Channel, logs: GrpcLogs
) -> None:
    await deploy(running)
    request = pb.InvokeRequest(
        function="adder.add", arguments=b'{"left": 20, "right": 30}', idempotency_key="once"
    )
    answers = [await ask_invoke(running, channel, request) for _ in range(3)]
    assert len({answer.invocation for answer in answers}) == 1
    records = await logs.log("sums", Session(answers[-1].position)).read_range()
    assert [record.data for record in records].count(b"50") == 1


async def test_the_error_of_a_function_reaches_its_caller(
    running: PlatformProcess, channel: grpc.aio.Channel
) -> None:
    await deploy(running)
    with pytest.raises(Exception, match="on purpose") as raised:
        await ask_invoke(running, channel, pb.InvokeRequest(function="adder.fail"))
    assert isinstance(raised.value.__cause__, grpc.aio.AioRpcError)
    assert raised.value.__cause__.code() is grpc.StatusCode.UNKNOWN


@pytest.mark.repeated("tests/cluster/test_open_files.py")
async def test_idle_connections_leave_open_files_to_the_journal(tmp_path: Path) -> None:
    """As over HTTP: a limit of 512 open files, and more connections than that."""
    with platform(tmp_path, "--grpc-port", "0", open_files_max=512) as running:
        address, token = grpc_address(running.url)
        host, _, port = address.partition(":")
        before = open_files(running)
        idle = [socket.create_connection((host, int(port))) for _ in range(600)]
        try:
            async with connect(running.url) as client:
                for _ in range(20):  # enough to roll a segment
                    await client.log("work").append(b"x" * 1_000_000)
            connections_max = status_of(running)["gateway"]["connections_max"]
            assert open_files(running) - before <= connections_max // 2 + 30
        finally:
            for connection in idle:
                connection.close()
        async with grpc.aio.insecure_channel(address) as channel:
            async with asyncio.timeout(120):
                await channel.channel_ready()
            assert await GrpcLogs(channel, token).log("work", Session()).tail() >= 20


def status_of(running: PlatformProcess) -> dict[str, Any]:
    with httpx.Client(**reach(running.url).for_httpx, timeout=120) as client:
        status: dict[str, Any] = client.get("/status").raise_for_status().json()
    return status


def open_files(running: PlatformProcess) -> int:
    """Return how many files the platform's process has open."""
    return sum(1 for _ in Path(f"/proc/{running.pid}/fd").iterdir())


async def test_tls_serves_the_gateways_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    options = ("--grpc-port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    with platform(tmp_path / "data", *options) as running:
        address, token = grpc_address(running.url)
        trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(address, trusted) as channel:
            log = GrpcLogs(channel, token).log("work", Session())
            assert await log.append(b"secret") == await log.tail() - 1
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await GrpcLogs(plain, token).ask("Tail", pb.TailRequest(log="w"), pb.TailResponse)


@pytest.mark.repeated("tests/contract/test_log.py")
async def test_a_client_in_another_language_uses_log_and_functions(
    running: PlatformProcess, tmp_path: Path
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is missing (Debian: apt-get install npm)")
    await deploy(running)
    folder = tmp_path / "node"
    shutil.copytree(ROOT / "tests/grpc", folder)
    npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    await ran(npm, folder)
    address, token = grpc_address(running.url)
    command = ["node", "client.js", str(PROTO), address, token]
    told = json.loads(await ran(command, folder))
    assert told["seqnums"] == sorted(told["seqnums"])
    assert told["placed"] is True
    assert told["last"] == "two"
    assert told["tags"] == ["customer:7", 12]
    assert told["streamed"] == "one"
    assert told["refused"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert told["result"] == 5
