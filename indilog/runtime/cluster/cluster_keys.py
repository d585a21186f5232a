"""Creates the keys of a cluster's nodes: an authority, and certificates signed by it
(docs/decisions/0044).

All keys are Ed25519. A certificate is valid from the year 2000 and never expires, so a wrong clock
excludes no node. Nodes get new keys only when an operator creates them. Each node also gets a copy
of one token for callers, which a cluster on several machines uses.

Files are written to a temporary directory, synced, and moved into place by one rename. So after a
crash, either all files of a node exist or none. `indilog cluster init` uses this module, and
`indilog.runtime.transport.peer_keys` loads the keys.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from indilog.base.errors import ConfigError
from indilog.runtime.cluster.token_file import TOKEN_FILE, new_token
from indilog.runtime.journal.segment import synced_directory
from indilog.runtime.transport.peer_keys import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE

AUTHORITY_FOLDER: Final = "authority"
AUTHORITY_KEY_FILE: Final = "cluster.key"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_VALID_FROM: Final = datetime(2000, 1, 1, tzinfo=UTC)
_VALID_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The date that RFC 5280 (4.1.2.5) gives to certificates that do not expire."""


def make_authority(directory: Path) -> Path:
    """Make the authority of a new cluster in `directory`; return its folder.

    Raises:
        ConfigError: the directory already has an authority, or cannot be used.
    """
    key = Ed25519PrivateKey.generate()
    name = _name_of(f"IndiLog cluster {os.urandom(4).hex()}")
    certificate = (
        _builder(key, name, name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    folder = directory / AUTHORITY_FOLDER
    with _new_folder(folder) as made:
        _write(made / AUTHORITY_KEY_FILE, _private(key), 0o600)
        _write(made / AUTHORITY_FILE, certificate.public_bytes(Encoding.PEM), 0o644)
        _write(made / TOKEN_FILE, new_token().encode(), 0o600)
    return folder


def make_node_keys(directory: Path, node: str) -> Path:
    """Make the keys of one node with the authority in `directory`; return their folder.

    Raises:
        ConfigError: there is no authority, the node already has keys, or the name is not allowed.
    """
    if not _NAME.fullmatch(node) or node == AUTHORITY_FOLDER:
        raise ConfigError(
            f"{node!r} cannot be the name of a node's keys: give up to 63 lower-case letters, "
            "digits and hyphens, and not 'authority'."
        )
    authority = directory / AUTHORITY_FOLDER
    try:
        issuer_key = load_pem_private_key((authority / AUTHORITY_KEY_FILE).read_bytes(), None)
        issued_by = (authority / AUTHORITY_FILE).read_bytes()
        issuer = x509.load_pem_x509_certificate(issued_by)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{authority} has no usable authority ({error}); make one with `indilog cluster init`."
        ) from error
    if not isinstance(issuer_key, Ed25519PrivateKey):
        raise ConfigError(f"The key in {authority} is no Ed25519 key; make a new authority.")
    key = Ed25519PrivateKey.generate()
    certificate = (
        _builder(key, _name_of(node), issuer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .sign(issuer_key, None)
    )
    folder = directory / node
    with _new_folder(folder) as made:
        _write(made / KEY_FILE, _private(key), 0o600)
        _write(made / CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM), 0o644)
        _write(made / AUTHORITY_FILE, issued_by, 0o644)
        if (token := authority / TOKEN_FILE).is_file():
            _write(made / TOKEN_FILE, token.read_bytes(), 0o600)
    return folder


def _builder(
    key: Ed25519PrivateKey, subject: x509.Name, issuer: x509.Name
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
    )


def _name_of(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for files. After the block, rename it to `folder`."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; nothing was changed.")
    made = folder.with_name(f"{folder.name}.new")
    try:
        shutil.rmtree(made, ignore_errors=True)  # left by a crash
        made.mkdir(mode=0o700, parents=True)
        yield made
        synced_directory(made)
        made.rename(folder)
        synced_directory(folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor has no path
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
