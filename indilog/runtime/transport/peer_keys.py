"""Loads the keys with which the processes of a platform authenticate each other (decision 0044).

A directory has three files, which `indilog cluster init` makes. `cluster.pem` is the certificate of
the cluster's authority. `node.pem` is the certificate that the authority gave to this node.
`node.key` is the node's private key. With these keys, a connection uses TLS 1.3 with mutual
authentication: *both* sides show a certificate of the authority. A peer without such a certificate
is refused in the handshake, before any of its messages is read.

All certificates of the authority are equivalent, because a node does not check a peer's name.
`cluster.pem` may contain several authorities, so that nodes can get new keys one after the other.
`StreamTransport` and the links of the metadata store use the keys.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, NamedTuple

from indilog.base.errors import ConfigError
from indilog.base.loopback import is_loopback
from indilog.config import NodeConfig
from indilog.runtime.transport.stream_address import StreamAddress

AUTHORITY_FILE: Final = "cluster.pem"
CERTIFICATE_FILE: Final = "node.pem"
KEY_FILE: Final = "node.key"
_OTHERS: Final = 0o077
"""The mode bits with which other users may read, write or execute a file."""


class PeerKeys(NamedTuple):
    """TLS contexts for accepted connections and for outgoing ones."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def keys_for(address: StreamAddress, config: NodeConfig) -> PeerKeys | None:
    """Return the keys for connections to or from `address`; None: the connections are not
    encrypted.

    Unix sockets are in a directory of this user, so their peers are processes of this user.

    Raises:
        ConfigError: the address is not on loopback and there are no keys, or the keys cannot be
            used.
    """
    if address.path:
        return None
    if (directory := config.messages.node_keys) is not None:
        return keys_in(directory)
    if not is_loopback(address.host):
        raise ConfigError(
            f"Nodes do not exchange messages at {address.name} without keys, because every machine "
            "that reaches it could read and append. Make keys with `indilog cluster init` and set "
            "node_keys, or use a loopback address."
        )
    return None


def keys_in(directory: Path) -> PeerKeys:
    """Return the keys in a directory.

    Raises:
        ConfigError: a file is missing, is damaged, or does not fit the other files; or other users
            may read the private key.
    """
    key = directory / KEY_FILE
    try:
        if key.stat().st_mode & _OTHERS:
            raise ConfigError(
                f"The private key {key} is open to other users; run `chmod 600 {key}`, and make "
                "new keys if others may have read it."
            )
        return PeerKeys(
            _context(directory, ssl.PROTOCOL_TLS_SERVER),
            _context(directory, ssl.PROTOCOL_TLS_CLIENT),
        )
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"The keys in {directory} cannot be used: {error}; make them with `indilog cluster "
            "init`."
        ) from error


def _context(directory: Path, kind: int) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # nodes may move; the authority's signature is enough
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(directory / AUTHORITY_FILE)
    context.load_cert_chain(
        directory / CERTIFICATE_FILE, directory / KEY_FILE, password=_no_password
    )
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are never resumed
    return context


def _no_password() -> str:
    raise ValueError("the key needs a password; give one without")
