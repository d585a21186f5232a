"""Attackers of the listener of a node: without a key, with a wrong key, or with garbage."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys
from indilog.runtime.transport.peer_keys import AUTHORITY_FILE, keys_in


class Clusters(NamedTuple):
    """Keys of a node of this cluster, and of one of another cluster."""

    own: Path
    other: Path


def two_clusters(directory: Path) -> Clusters:
    """Make the keys of two clusters."""
    folders = []
    for name in ("own", "other"):
        make_authority(directory / name)
        folders.append(make_node_keys(directory / name, "node"))
    return Clusters(*folders)


def place(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def in_plain_text(at: tuple[str, int], _: Clusters) -> None:
    """Send a well-formed frame without TLS."""
    send(at, (5).to_bytes(4, "little") + b"hello")


def with_garbage(at: tuple[str, int], _: Clusters) -> None:
    send(at, os.urandom(4096))


def with_a_huge_length(at: tuple[str, int], _: Clusters) -> None:
    send(at, b"\xff" * 4 + bytes(1 << 16))


def send(at: tuple[str, int], data: bytes) -> None:
    """Send bytes, as far as the listener takes them."""
    with socket.create_connection(at) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(data)
        closed(peer)


def that_leaves(at: tuple[str, int], _: Clusters) -> None:
    socket.create_connection(at).close()


def without_a_key(at: tuple[str, int], _: Clusters) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    speak(at, context)


def with_a_key_of_another_cluster(at: tuple[str, int], clusters: Clusters) -> None:
    """It would also accept our certificate."""
    context = keys_in(clusters.other).client
    context.verify_mode = ssl.CERT_NONE
    speak(at, context)


def with_a_key_of_a_false_issuer(at: tuple[str, int], clusters: Clusters) -> None:
    """Its certificate names our authority as the issuer, which has not signed it."""
    forged = clusters.other / "forged.pem"
    if not forged.exists():
        issuer = x509.load_pem_x509_certificate((clusters.own / AUTHORITY_FILE).read_bytes())
        key = Ed25519PrivateKey.generate()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(issuer.not_valid_before_utc)
            .not_valid_after(issuer.not_valid_after_utc)
            .sign(key, None)
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        forged.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(forged)
    speak(at, context)


def over_an_older_tls(at: tuple[str, int], clusters: Clusters) -> None:
    context = keys_in(clusters.own).client
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    speak(at, context)


def speak(at: tuple[str, int], context: ssl.SSLContext) -> None:
    """Send a well-formed frame, as far as the listener takes it."""
    with socket.create_connection(at) as plain:
        try:
            with context.wrap_socket(plain) as peer:
                peer.sendall((5).to_bytes(4, "little") + b"hello")
                closed(peer)
        except OSError:  # of TLS, too
            return


def closed(peer: socket.socket) -> None:
    """Wait until the listener closes the connection."""
    peer.settimeout(60)
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        return


Attack = Callable[[tuple[str, int], Clusters], None]
ATTACKS: Final[tuple[Attack, ...]] = (
    in_plain_text, with_garbage, with_a_huge_length, that_leaves, without_a_key,
    with_a_key_of_another_cluster, with_a_key_of_a_false_issuer, over_an_older_tls,
)  # fmt: skip
