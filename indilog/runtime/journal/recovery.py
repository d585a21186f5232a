"""Recovers the roles of a process: they restore the newest checkpoint, replay later frames, and are
notified of losses (ARCHITECTURE 11, decisions 0009 and 0028).

`NodeShell` calls `recover` at its start. Programs that only read a journal call `read`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog

from indilog.base.errors import DataDirectoryError, IndilogError, MalformedFrameError
from indilog.roles.role import Checkpoints, FrameKind, Lost, Role, SurvivesLoss, TakesCopies
from indilog.runtime.journal.checkpoint_files import JournalCheckpoint
from indilog.runtime.journal.damage_log import DamageLog
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.journal_reader import FileRead, Frame, JournalReader
from indilog.runtime.journal.segment import BATCH_KINDS, is_batch_of
from indilog.runtime.journal.segment_scan import Damage

log = structlog.get_logger(__name__)

_KINDS: Final = {int(kind): kind for kind in FrameKind}


def recover(journal: Journal, roles: Mapping[int, Role], *, lost: bool = False) -> int:
    """Restore the roles from the newest checkpoint, replay later frames, and return the number of
    replayed frames. `roles` is keyed by stream.

    If the stream of damaged bytes is unknown, all roles are notified of the damage. All roles are
    also notified if `lost` is set: the process had a journal at an earlier start, and now the
    journal is empty.

    Raises:
        IndilogError: the journal belongs to other roles.
        DataLossError: a role cannot run without the damaged frames.
    """
    if lost:
        if journal.created:  # log only once, not at later starts with an empty journal
            log.error("the journal is gone: its directory was here at an earlier start")
        _tell(Damage(0, 0, 0, None, b""), roles)
    if (checkpoint := journal.load_checkpoint()) is not None:
        gone = journal.missing_segments()
        journal.damaged += len(gone)
        restore(journal.directory, checkpoint, gone, roles)
    damage = DamageLog()
    try:
        return replay(journal.recover(), roles, damage)
    finally:
        damage.conclude(journal)


def read(reader: JournalReader, roles: Mapping[int, Role]) -> None:
    """Restore new roles, keyed by stream, from a journal. The journal is not changed.

    Raises:
        IndilogError: the journal belongs to other roles.
        DataLossError: a role cannot run without the damaged frames.
        OSError: an error of the system; a running process may have replaced a file.
    """
    if (checkpoint := reader.load_checkpoint()) is not None:
        restore(reader.directory, checkpoint, reader.missing_segments(), roles)
    reader.open_files()
    frames = (found for found in reader.frames() if not isinstance(found, FileRead))
    replay(frames, roles, DamageLog())


def restore(
    directory: Path, checkpoint: JournalCheckpoint, gone: Collection[int], roles: Mapping[int, Role]
) -> None:
    """Restore all roles from a checkpoint. `gone` are the missing segments before it.

    Raises:
        IndilogError: the checkpoint belongs to other roles, or to a newer release.
    """
    if gone:
        log.error("segments of the journal are gone", numbers=sorted(gone))
    for stream, payload in checkpoint.roles.items():
        role: object = roles.get(stream)
        if role is None and stream in checkpoint.derived:
            continue  # the role is retired; if it runs here again, it fetches its state then
        if not isinstance(role, Checkpoints):
            raise IndilogError(
                "The journal holds a checkpoint of a role that this process does not run."
            )
        try:
            role.restore(payload, gone)
        except MalformedFrameError as error:
            raise DataDirectoryError(
                f"The checkpoint in {directory} cannot be read by this release ({error}); "
                "start the release that wrote it."
            ) from error


def replay(found: Iterable[Frame | Damage], roles: Mapping[int, Role], damage: DamageLog) -> int:
    """Replay frames and damage in the order of the journal; return the number of frames.

    Raises:
        IndilogError: a frame belongs to another role.
        DataLossError: a role cannot run without the damaged frames.
    """
    frames = 0
    takers = [role for role in roles.values() if isinstance(role, TakesCopies)]
    for one in found:
        if isinstance(one, Damage):
            damage.met(one)
            _tell(one, roles)
            continue
        stream, kind, payload, location = one
        if (role := roles.get(stream)) is None:
            raise IndilogError("The journal holds frames of a role that this process does not run.")
        role.recover(kind, payload, location)
        damage.recovered(stream, kind, payload)
        if kind is FrameKind.ORDERING:
            for other in takers:
                other.copied(payload)
        frames += 1
    for role in roles.values():
        if isinstance(role, SurvivesLoss):
            role.recovered()
    return frames


def _tell(damage: Damage, roles: Mapping[int, Role]) -> None:
    header = damage.header
    payload = damage.payload
    if header is not None and header.kind in BATCH_KINDS and not is_batch_of(header, payload):
        payload = b""  # the bytes do not belong to this header
    lost = Lost(_KINDS.get(header.kind) if header else None, payload, damage.location)
    for stream, role in roles.items():
        if isinstance(role, SurvivesLoss) and (header is None or header.stream == stream):
            role.lost(lost)
