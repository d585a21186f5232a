"""The metadata store on ZooKeeper: failover, lost connections, access control, encryption.

The contract of all metadata stores has a suite of its own: `tests/contract/test_metadata_store.py`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from kazoo.exceptions import ConnectionLoss

from indilog.base.errors import (
    ConfigError,
    DataDirectoryError,
    OverloadedError,
    QuorumUnavailableError,
    TooLargeError,
)
from indilog.config import NodeConfig, node_config
from indilog.runtime.metadata.store import SessionExpiredError, Versioned, Written
from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore
from indilog.runtime.metadata.zookeeper_connection import PASSWORD_VARIABLE, ZooKeeperConnection
from tests.support.zookeeper_server import (
    ZooKeeperServer,
    ensemble_running,
    hosts_of,
    zookeeper_running,
)

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.asyncio]

PASSWORD = "correct horse"


def config_at(*servers: ZooKeeperServer, **settings: object) -> NodeConfig:
    return node_config(
        **{"zookeeper_hosts": hosts_of(servers), "metadata_timeout_s": 300.0} | settings
    )


@asynccontextmanager
async def opened(config: NodeConfig) -> AsyncIterator[ZooKeeperMetadataStore]:
    """Open a store, however long servers that have just started take."""
    while True:
        try:
            store = await ZooKeeperMetadataStore.open(config)
        except QuorumUnavailableError:
            continue
        break
    async with store:
        yield store


@pytest.fixture
def root(tmp_path: Path) -> str:
    """The test's own part of the shared ZooKeeper."""
    return f"/{tmp_path.parent.name}/{tmp_path.name}"


def leader_of(servers: Sequence[ZooKeeperServer]) -> ZooKeeperServer:
    """Wait for a leader: a busy ensemble may just elect another one."""
    while True:
        for server in servers:
            if server.mode() == "leader":
                return server
        time.sleep(0.05)


async def write(store: ZooKeeperMetadataStore, key: str, value: bytes, expected: int = 0) -> int:
    outcome = await store.compare_and_set(key, value, expected_version=expected)
    assert isinstance(outcome, Written)
    return outcome.version


async def follow(store: ZooKeeperMetadataStore, key: str, last: bytes) -> None:
    """Watch a key until it has the value `last`.

    A watcher may see a value before its writer has the answer. So the end of the writer cannot end
    the watcher.
    """
    value, version = b"", 0
    while value != last:
        found = await store.watch(key, after=version)
        assert found is not None
        assert found.version > version
        value, version = found


async def test_nothing_is_lost_or_issued_twice_when_the_leader_of_an_ensemble_is_killed(
    tmp_path: Path,
) -> None:
    """Writers, a session and a watcher continue while another server becomes the leader."""
    with ensemble_running(tmp_path) as servers:
        leader = leader_of(servers)
        rest = [server for server in servers if server is not leader]
        async with opened(config_at(*servers)) as store, opened(config_at(*servers)) as other:
            session = await other.session(60.0)
            held = await session.create("d/leader", b"held")
            assert isinstance(held, Written)
            stop = asyncio.Event()

            async def count() -> tuple[int, int]:
                """Increment a value until the end; return it and its version."""
                number, version = 0, 0
                while not stop.is_set():
                    number += 1
                    version = await write(store, "d/count", str(number).encode(), version)
                return number, version

            async def take() -> list[int]:
                numbers = []
                while not stop.is_set():
                    numbers.append(await other.next_sequence("epoch"))
                return numbers

            counting, taking = asyncio.create_task(count()), asyncio.create_task(take())
            following = asyncio.create_task(follow(other, "d/count", b"end"))
            while (found := await other.get("d/count")) is None or int(found.value) < 20:
                pass
            leader.kill()
            before = await other.next_sequence("epoch")
            await asyncio.to_thread(leader_of, rest)
            async with opened(config_at(*rest)) as late:
                found = await late.get("d/count")
                assert found is not None
                reached = int(found.value) + 20
                while (found := await late.get("d/count")) is None or int(found.value) < reached:
                    pass
                stop.set()
                number, version = await counting
                assert await late.get("d/count") == Versioned(str(number).encode(), version)
                await write(late, "d/count", b"end", version)
                await following
                numbers = [*await taking, before]
                assert len(set(numbers)) == len(numbers)
                session.check()
                assert await late.get("d/leader") == Versioned(b"held", held.version)
            await session.close()


@pytest.mark.repeated("tests/contract/test_metadata_sessions.py")
async def test_without_a_majority_requests_fail_in_time_and_nothing_is_decided(
    tmp_path: Path,
) -> None:
    with ensemble_running(tmp_path) as servers:
        async with opened(config_at(*servers, metadata_timeout_s=12.0)) as store:
            version = await write(store, "view", b"one")
            session = await store.session(12.0)
            for server in servers[:2]:
                server.kill()
            with pytest.raises(QuorumUnavailableError, match=r"did not answer for 12 s"):
                await store.compare_and_set("view", b"two", expected_version=version)
            await session.wait_until_expired()
            with pytest.raises(SessionExpiredError):
                session.check()
            for server in servers[:2]:
                server.start()
            for server in servers:
                await asyncio.to_thread(server.wait_ready)
            async with opened(config_at(*servers)) as later:
                found = await later.get("view")
                assert found is not None
                assert found.value in {b"one", b"two"}, "the outcome is unknown, but one of both"


@pytest.mark.repeated("tests/unit/runtime/metadata/test_session.py")
async def test_servers_that_do_not_answer_are_noticed_by_the_clients_own_time(
    tmp_path: Path,
) -> None:
    """Kazoo reports a lost session only when a server answers again; the owner stops earlier."""
    with zookeeper_running(tmp_path) as server:
        async with opened(config_at(server, metadata_timeout_s=12.0)) as store:
            session = await store.session(12.0)
            await session.create("leader", b"")
            server.pause()
            try:
                await session.wait_until_expired()
                with pytest.raises(SessionExpiredError):
                    session.check()
                with pytest.raises(QuorumUnavailableError):
                    await store.get("leader")
            finally:
                server.resume()


async def test_a_connection_whose_first_request_is_never_answered_is_opened_again(
    zookeeper: ZooKeeperServer, root: str
) -> None:
    """ZooKeeper does not answer some of the requests that come while it starts."""
    unanswered = 2

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal unanswered
        if unanswered:
            unanswered -= 1
            await reader.read()
            writer.close()
            return
        behind = await asyncio.open_connection("127.0.0.1", zookeeper.port)
        await asyncio.gather(pass_on(reader, behind[1]), pass_on(behind[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as front:
        port = front.sockets[0].getsockname()[1]
        config = config_at(
            zookeeper,
            zookeeper_hosts=f"127.0.0.1:{port}",
            zookeeper_root=root,
            metadata_session_s=60.0,
            metadata_timeout_s=150.0,
        )
        async with opened(config) as store:
            assert await store.get("d/a") is None
    assert not unanswered


@pytest.mark.repeated("tests/unit/runtime/metadata/test_service.py")
async def test_requests_that_wait_for_a_silent_server_are_bounded(tmp_path: Path) -> None:
    with zookeeper_running(tmp_path) as server:
        config = config_at(server, metadata_watchers_max=50, metadata_timeout_s=12.0)
        async with opened(config) as store:
            server.pause()
            try:
                reads = [asyncio.create_task(store.get(f"k{i}")) for i in range(200)]
                outcomes = await asyncio.gather(*reads, return_exceptions=True)
            finally:
                server.resume()
            kinds = [type(outcome) for outcome in outcomes]
            assert kinds.count(OverloadedError) == 150
            assert kinds.count(QuorumUnavailableError) == 50


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Lose the answers of those committed transactions for which the list has True."""
    from indilog.runtime.metadata.zookeeper import _Change

    plan: list[bool] = []
    real = _Change.commit

    async def commit(self: _Change, connection: ZooKeeperConnection) -> int | None:
        outcome = await real(self, connection)
        if plan and plan.pop(0):
            raise ConnectionLoss
        return outcome

    monkeypatch.setattr(_Change, "commit", commit)
    yield plan
    assert not plan, "each answer that was to be lost was"


async def test_a_write_whose_answer_was_lost_recognises_itself(
    zookeeper: ZooKeeperServer, root: str, lost_answers: list[bool]
) -> None:
    async with opened(config_at(zookeeper, zookeeper_root=root)) as store:
        lost_answers[:] = [True]
        first = await write(store, "view", b"one")
        lost_answers[:] = [True, False]
        second = await write(store, "view", b"two", first)
        assert await store.get("view") == Versioned(b"two", second)
        session = await store.session(60.0)
        lost_answers[:] = [True]
        assert isinstance(await session.create("leader", b""), Written)
        lost_answers[:] = [True]
        await store.delete("view", expected_version=second)
        assert await store.get("view") is None
        await session.close()


@pytest.mark.parametrize("other_keys", [0, 1, 2])
async def test_a_creation_whose_answer_was_lost_is_not_repeated_after_a_deletion(
    zookeeper: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch, other_keys: int
) -> None:
    """The key was deleted, and other keys were created, before the client was connected again."""
    from indilog.runtime.metadata.zookeeper import _Change

    async with (
        opened(config_at(zookeeper, zookeeper_root=root)) as store,
        opened(config_at(zookeeper, zookeeper_root=root)) as other,
    ):
        real, versions = _Change.commit, list[int]()

        async def commit(self: _Change, connection: ZooKeeperConnection) -> int | None:
            outcome = await real(self, connection)
            if not versions and outcome is not None:
                versions.append(outcome)
                await other.delete("leader", expected_version=outcome)
                for i in range(other_keys):
                    await write(other, f"key-{i}", b"")
                raise ConnectionLoss
            return outcome

        monkeypatch.setattr(_Change, "commit", commit)
        creating = store.compare_and_set("leader", b"mine", expected_version=0)
        if other_keys:
            with pytest.raises(QuorumUnavailableError, match="outcome is unknown"):
                await creating
        else:
            assert await creating == Written(versions[0])
        assert await store.get("leader") is None


@pytest.mark.parametrize("other_keys", [0, 1])
async def test_a_creation_that_was_lost_with_its_connection_is_repeated(
    zookeeper: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch, other_keys: int
) -> None:
    from indilog.runtime.metadata.zookeeper import _Change

    async with (
        opened(config_at(zookeeper, zookeeper_root=root)) as store,
        opened(config_at(zookeeper, zookeeper_root=root)) as other,
    ):
        real, lost = _Change.commit, list[_Change]()

        async def commit(self: _Change, connection: ZooKeeperConnection) -> int | None:
            if not lost:
                lost.append(self)
                for i in range(other_keys):
                    await write(other, f"key-{i}", b"")
                raise ConnectionLoss
            return await real(self, connection)

        monkeypatch.setattr(_Change, "commit", commit)
        written = await store.compare_and_set("leader", b"mine", expected_version=0)
        assert isinstance(written, Written)
        assert await store.get("leader") == Versioned(b"mine", written.version)


async def test_a_key_that_was_created_anew_between_look_and_write_is_not_overwritten(
    zookeeper: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper's data version of the new znode is 0 again."""
    async with (
        opened(config_at(zookeeper, zookeeper_root=root)) as store,
        opened(config_at(zookeeper, zookeeper_root=root)) as other,
    ):
        version = await write(store, "leader", b"mine")
        real, looked = store._state, asyncio.Event()

        async def state(connection: ZooKeeperConnection, key: str, writer: str) -> object:
            found = await real(connection, key, writer)
            if not looked.is_set():
                looked.set()
                await other.delete("leader", expected_version=version)
                await write(other, "leader", b"theirs")
            return found

        monkeypatch.setattr(store, "_state", state)
        late = await store.compare_and_set("leader", b"late", expected_version=version)
        found = await other.get("leader")
        assert found is not None
        assert found.value == b"theirs"
        assert late == (found.version,)
        assert not isinstance(late, Written)


async def test_a_write_through_a_session_that_zookeeper_does_not_know_is_refused(
    zookeeper: ZooKeeperServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kazoo would send it over the next session."""
    async with opened(config_at(zookeeper, zookeeper_root=root)) as store:
        session = await store.session(60.0)

        async def unaware() -> bool:
            return True

        monkeypatch.setattr(session, "_heartbeat", unaware)
        await asyncio.to_thread(store._client.delete, session._path)
        with pytest.raises(SessionExpiredError):
            await session.compare_and_set("view", b"x", expected_version=0)
        with pytest.raises(SessionExpiredError):
            session.check()
        assert await store.get("view") is None


async def test_many_watches_of_one_key_are_one_watch_of_zookeeper(
    zookeeper: ZooKeeperServer, root: str
) -> None:
    async with opened(config_at(zookeeper, zookeeper_root=root)) as store:
        version = await write(store, "d/a", b"")
        for _ in range(3):  # each round leaves its watch behind
            revision = (await store.list_keys("d/")).revision
            watches: list[asyncio.Future[object]] = []
            for _ in range(50):
                watches.append(asyncio.ensure_future(store.watch("d/a", after=version)))
                following = store.watch_directory("d/", after=revision)
                watches.append(asyncio.ensure_future(following))
            while not store._client._child_watchers:
                await store.get("d/a")
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        assert len(store._followers._followers) == 0
        for _ in range(100):  # changes of values fire no watch of children
            version = await write(store, "d/a", b"", version)
            await store.watch_directory("d/", after=0)
        held = store._client._data_watchers | store._client._child_watchers
        assert sum(map(len, held.values())) <= 3


async def test_a_shorter_time_that_zookeeper_grants_counts(tmp_path: Path) -> None:
    with zookeeper_running(tmp_path, {"maxSessionTimeout": "3000"}) as server:
        async with opened(config_at(server)) as store:
            session = await store.session(60.0)
            assert session.ttl_s == 3.0
            await session.close()


async def test_a_value_over_what_zookeeper_takes_is_refused_and_the_connection_stays(
    zookeeper: ZooKeeperServer, root: str
) -> None:
    async with opened(config_at(zookeeper, zookeeper_root=root)) as store:
        version = await write(store, "k" * 256, b"x" * 1_000_000)
        with pytest.raises(TooLargeError, match="1,000,000"):
            await store.compare_and_set("k", b"x" * 1_000_001, expected_version=0)
        found = await store.get("k" * 256)
        assert found is not None
        assert (len(found.value), found.version) == (1_000_000, version)


async def test_a_znode_of_another_program_is_reported(
    zookeeper: ZooKeeperServer, root: str
) -> None:
    async with opened(config_at(zookeeper, zookeeper_root=root)) as store:
        version = await write(store, "view", b"one")
        assert version
        await asyncio.to_thread(store._client.set, f"{root}/keys/=/=view", b"rubbish")
        with pytest.raises(DataDirectoryError, match="was not written by this program"):
            await store.get("view")


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    return file


async def test_with_digest_only_the_configured_user_has_access(
    zookeeper: ZooKeeperServer,
    root: str,
    password_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    mine = config_at(
        zookeeper,
        zookeeper_root=root,
        zookeeper_auth="digest",
        zookeeper_password_file=password_file,
    )
    async with opened(mine) as store:
        await write(store, "view", b"one")
        session = await store.session(60.0)
        await session.create("nodes/a", b"")
        await session.close()
    with pytest.raises(ConfigError, match=r"refuses this client \(NoAuthError\)"):
        await ZooKeeperMetadataStore.open(config_at(zookeeper, zookeeper_root=root))
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
    with pytest.raises(ConfigError, match=r"refuses this client \(NoAuthError\)"):
        await ZooKeeperMetadataStore.open(mine)
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    async with opened(mine) as store:
        assert await store.get("view") is not None
    assert PASSWORD not in caplog.text


async def test_a_password_that_is_missing_is_named_in_one_sentence(
    zookeeper: ZooKeeperServer, tmp_path: Path
) -> None:
    for settings, words in (
        ({}, "set zookeeper_password_file or the environment variable"),
        ({"zookeeper_password_file": tmp_path / "none"}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            await ZooKeeperMetadataStore.open(
                config_at(zookeeper, zookeeper_auth="digest", **settings)
            )


async def test_with_sasl_a_wrong_password_is_refused_at_once(
    tmp_path: Path,
    password_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    jaas = tmp_path / "jaas.conf"
    jaas.write_text(
        "Server { org.apache.zookeeper.server.auth.DigestLoginModule required "
        f'user_indilog="{PASSWORD}"; }};\n'
    )
    settings = {
        "authProvider.1": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
        "sessionRequireClientSASLAuth": "true",
    }
    properties = [f"-Djava.security.auth.login.config={jaas}"]
    with zookeeper_running(tmp_path / "server", settings, properties) as server:
        config = config_at(server, zookeeper_auth="sasl", zookeeper_password_file=password_file)
        async with opened(config) as store:
            await write(store, "view", b"one")
            session = await store.session(60.0)
            await session.create("nodes/a", b"")
            await session.close()
        assert PASSWORD not in caplog.text
        monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="refuses this client"):
            await ZooKeeperMetadataStore.open(config)
        assert time.monotonic() - begun < 300.0, "not only when the time is over"
        with pytest.raises((ConfigError, QuorumUnavailableError)):
            await ZooKeeperMetadataStore.open(config_at(server, metadata_timeout_s=2.0))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_with_tls_both_sides_show_certificates(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ca, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(ca)
    stranger.cert_pem.write_to_path(other)
    server_cert, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    # ZooKeeper reads keys in PKCS #8 only.
    key = load_pem_private_key(server_cert.private_key_pem.bytes(), None)
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = b"".join(pem.bytes() for pem in server_cert.cert_chain_pems)
    trustme.Blob(plain + chain).write_to_path(tmp_path / "server.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
    client.private_key_pem.write_to_path(tmp_path / "client.key")
    settings = {
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": str(tmp_path / "server.pem"),
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": str(ca),
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "need",
    }
    with zookeeper_running(tmp_path / "zk", settings, (), "secureClientPort") as server:
        tls = {
            "zookeeper_tls": True,
            "zookeeper_tls_ca": ca,
            "zookeeper_tls_cert": tmp_path / "client.pem",
            "zookeeper_tls_key": tmp_path / "client.key",
        }
        async with opened(config_at(server, **tls)) as store:
            version = await write(store, "view", b"one")
            assert await store.get("view") == Versioned(b"one", version)
        for wrong in (
            {"zookeeper_tls": False},
            {"zookeeper_tls_ca": other},
            {"zookeeper_tls_cert": None, "zookeeper_tls_key": None},
            {"zookeeper_hosts": f"localhost:{server.port}"},
        ):
            config = config_at(server, **(tls | {"metadata_timeout_s": 2.0} | wrong))
            with pytest.raises(QuorumUnavailableError, match="did not answer"):
                await ZooKeeperMetadataStore.open(config)
        gc.collect()  # kazoo leaves the sockets of failed handshakes to it
