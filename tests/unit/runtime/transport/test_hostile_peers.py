"""Peers that are no nodes of this cluster: refused, counted, and harmless to the others."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

import pytest

from indilog.base.errors import ConfigError
from indilog.config import Config, node_config
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.service import MetadataServer
from indilog.runtime.transport import stream_server
from indilog.runtime.transport.peer_keys import KEY_FILE, keys_in
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.transport import (
    MALFORMED,
    REFUSED_PEER,
    TOO_MANY_CONNECTIONS,
    TransportCounts,
)
from tests.support.strangers import ATTACKS, Attack, Clusters, closed, place, two_clusters
from tests.unit.runtime.network import A, B, Inbox, Network, limited, on_uvloop, until

TRIES: Final = 5


@pytest.fixture
def clusters(tmp_path: Path) -> Clusters:
    return two_clusters(tmp_path)


@pytest.fixture
def network(clusters: Clusters, tmp_path: Path) -> Network[StreamTransport]:
    return Network(StreamTransport, tmp_path, clusters.own)


async def attacked(counts: TransportCounts, attack: Attack, at: str, clusters: Clusters) -> None:
    """Attack some times, and wait until every attack is counted."""
    for _ in range(TRIES):
        await asyncio.to_thread(attack, place(at), clusters)
    await until(lambda: counts.dropped[REFUSED_PEER] >= TRIES)
    assert dict(counts.dropped) == {REFUSED_PEER: TRIES}


@pytest.mark.parametrize("attack", ATTACKS)
@on_uvloop
async def test_a_stranger_is_refused_and_counted_and_nodes_are_served(
    network: Network[StreamTransport], clusters: Clusters, attack: Attack
) -> None:
    b, inbox = network.receiving(B)
    await attacked(b.counts, attack, network.addresses[B], clusters)
    a = network.transport(A)
    a.send(B, b"from a node")
    a.flush()
    assert await inbox.until(1) == [b"from a node"]
    assert b.counts.frames_received == 1


@pytest.mark.parametrize("attack", ATTACKS)
@on_uvloop
async def test_a_stranger_gets_nothing_of_the_metadata_store(
    network: Network[StreamTransport], clusters: Clusters, attack: Attack, tmp_path: Path
) -> None:
    config = node_config(node_keys=clusters.own, metadata_timeout_s=20.0)
    address = network.new_address("metadata")
    with EmbeddedMetadataStore(tmp_path / "metadata", config) as store:
        server = MetadataServer(store, address, config)
        await attacked(server.counts, attack, address, clusters)
        async with MetadataClient(address, config) as client:
            assert await client.next_sequence("epoch") == 1
        assert server.ignored == 0
        await server.close()


@on_uvloop
async def test_a_node_sends_nothing_to_a_listener_of_another_cluster(
    network: Network[StreamTransport], clusters: Clusters, tmp_path: Path
) -> None:
    other = Network(StreamTransport, tmp_path, clusters.other)
    other.addresses = network.addresses
    b, inbox = other.receiving(B)
    a = network.transport(A)
    a.send(B, b"secret")
    a.flush()
    await until(lambda: a.counts.dropped[REFUSED_PEER] > 1 and b.counts.dropped[REFUSED_PEER] > 1)
    assert not inbox.frames
    assert b.counts.frames_received == 0
    other.close()


@on_uvloop
async def test_a_node_of_this_cluster_may_not_send_a_frame_over_the_limit(
    network: Network[StreamTransport], clusters: Clusters
) -> None:
    """The frame's length is refused before the frame is received."""
    b, inbox = network.receiving(B, limited(message_bytes_max=5000))
    context = keys_in(clusters.own).client

    def send_huge() -> None:
        with (
            socket.create_connection(place(network.addresses[B])) as plain,
            context.wrap_socket(plain) as peer,
        ):
            peer.sendall((5001).to_bytes(4, "little"))
            closed(peer)

    await asyncio.to_thread(send_huge)
    assert b.counts.dropped[MALFORMED] == 1
    assert not inbox.frames


@on_uvloop
async def test_strangers_that_stay_silent_do_not_keep_nodes_out(
    network: Network[StreamTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than handshakes at once, and each would hold its place for an hour."""
    monkeypatch.setattr(stream_server, "HANDSHAKE_S_MAX", 3600.0)
    monkeypatch.setattr(stream_server, "HANDSHAKES_MAX", 8)
    b, inbox = network.receiving(B)
    silent = [socket.create_connection(place(network.addresses[B])) for _ in range(20)]
    await until(lambda: b.counts.dropped[TOO_MANY_CONNECTIONS] >= 12)
    await asyncio.to_thread(closed, silent[0])
    a = network.transport(A)
    a.send(B, b"from a node")
    a.flush()
    assert await inbox.until(1) == [b"from a node"]
    for stranger in silent:
        stranger.close()


@on_uvloop
async def test_a_silent_stranger_is_refused_after_a_while(
    network: Network[StreamTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_S_MAX", 0.05)
    b, _ = network.receiving(B)
    with socket.create_connection(place(network.addresses[B])) as stranger:
        await asyncio.to_thread(closed, stranger)
    await until(lambda: b.counts.dropped[REFUSED_PEER] == 1)


@pytest.mark.parametrize("address", ["stream://192.0.2.7:7401", "stream://[2001:db8::1]:7401"])
@on_uvloop
async def test_other_machines_are_neither_heard_nor_told_without_keys(
    address: str, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    local = f"unix://{tmp_path}/a"
    for own, addresses in ((address, {A: address}), (local, {A: local, B: address})):
        with pytest.raises(ConfigError, match=r"without keys.*indilog cluster init"):
            StreamTransport(own, addresses, loop, Config())
    with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as store:
        with pytest.raises(ConfigError, match=r"without keys.*indilog cluster init"):
            MetadataServer(store, address, node_config())
        with pytest.raises(ConfigError, match=r"without keys.*indilog cluster init"):
            MetadataClient(address, node_config())


def test_a_private_key_that_others_may_read_is_refused(clusters: Clusters) -> None:
    (clusters.own / KEY_FILE).chmod(0o640)
    with pytest.raises(ConfigError, match="is open to other users; run `chmod 600"):
        keys_in(clusters.own)


def test_a_key_of_another_certificate_is_refused_in_one_sentence(clusters: Clusters) -> None:
    (clusters.own / KEY_FILE).write_bytes((clusters.other / KEY_FILE).read_bytes())
    with pytest.raises(ConfigError, match=r"The keys in .* cannot be used.*KEY_VALUES_MISMATCH"):
        keys_in(clusters.own)


@on_uvloop
async def test_nodes_of_two_authorities_reach_each_other_while_keys_are_changed(
    network: Network[StreamTransport], clusters: Clusters
) -> None:
    """Every node first learns the new authority, then gets a key of it."""
    both = b"".join((c / "cluster.pem").read_bytes() for c in clusters)
    for folder in clusters:
        (folder / "cluster.pem").write_bytes(both)
    inboxes: list[Inbox] = []
    for keys in clusters:
        network._keys = keys
        a, (_, inbox) = network.transport(A), network.receiving(B)
        network._keys = clusters.other
        a.send(B, b"x")
        a.flush()
        await inbox.until(1)
        inboxes.append(inbox)
        network.close()
    assert [inbox.frames for inbox in inboxes] == [[b"x"], [b"x"]]
