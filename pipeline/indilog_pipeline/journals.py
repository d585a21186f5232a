"""The state of all nodes of a data directory, restored from their journals (decision 0035).

The roles themselves are restored and replayed, as at a start of the platform. Storage nodes journal
metalog entries in groups and unsynced, so a journal may lack the last entries. Each storage node
then gets the committed entries that its journal lacks. `LogImage.read` calls `read_journals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from indilog.base.errors import DataDirectoryError, DataLossError
from indilog.base.ids import Epoch, MetalogPosition, NodeId, majority
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import encode_entries
from indilog.kernel.view import View
from indilog.roles.role import FrameKind, Location, Role
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.cold_place import folders_noted
from indilog.runtime.journal.journal import stream_of
from indilog.runtime.journal.journal_directory import check_version
from indilog.runtime.journal.journal_reader import JournalReader
from indilog.runtime.journal.moved_frames import MovedFrames
from indilog.runtime.journal.recovery import read
from indilog.runtime.journal.segment_files import SegmentFile
from indilog_ordering.sequencer import Sequencer
from indilog_ordering.stored_metalog import StoredMetalog
from indilog_storage.node import StorageNode
from indilog_storage.ordering import Ordering

ATTEMPTS_MAX: Final = 10
"""Attempts to read a directory while a platform replaces files in it."""
_ENTRIES_AT_ONCE: Final = 4096
_NOWHERE: Final = Location(0, 0, 0)


class FilesChangedError(Exception):
    """A running platform replaced files while they were read; read the directory again."""


class StoredNode(NamedTuple):
    """A storage node restored from its journal, and where its batches are.

    `cold`: place and folder of its objects on cold storage; None: it has no objects.
    """

    role: StorageNode
    moved: MovedFrames
    files: dict[int, SegmentFile]
    cold: tuple[str, str] | None = None


class StoredNodes(NamedTuple):
    """All storage nodes of a data directory, and the extent of the committed metalog.

    Below the committed length, the nodes in `nodes` have applied only entries of the committed
    metalog. Some nodes may lack the last committed entries; `ordering` has all of them.
    """

    view: View
    committed: Extent
    ordering: Ordering
    nodes: list[StoredNode]


def read_journals(directory: Path) -> StoredNodes:
    """Read all journals of a data directory; changes nothing.

    Raises:
        FilesChangedError: a running platform replaced files meanwhile.
        DataDirectoryError: there is no data directory, or another release wrote it.
        DataLossError: the order of the log is damaged, and there is no copy of it.
    """
    layout = layout_in(directory)
    view = layout.view
    # Sequencers are read first. The records that their copies of the metalog order are then already
    # on the disks of storage nodes. In shared processes, a sequencer and a storage node have one
    # journal. A committed entry is then in two journals, and its records have two replicas. One of
    # these replicas is read after the first of the two journals, or together with it.
    journals = layout.journals((*view.sequencers, *view.storage_nodes))
    missing = [name for name in journals if not (directory / name).is_dir()]
    if layout.arrangement == "machines" and missing:
        raise DataDirectoryError(
            f"{directory} has no journal of {', '.join(missing)}, which are on other machines: "
            "stop the cluster, and copy their folders there."
        )
    roles: dict[NodeId, Role] = {}
    stored: list[StoredNode] = []
    for journal, nodes in ((directory / name, nodes) for name, nodes in journals.items()):
        reader = _read_journal(journal, nodes, view, roles)
        cold = folders_noted(journal)
        for node in nodes:
            if isinstance(role := roles[node], StorageNode):
                folder = (cold.place, cold.of(node)) if cold is not None else None
                stored.append(StoredNode(role, reader.moved, reader.files, folder))
    sequencers = [role for role in roles.values() if isinstance(role, Sequencer)]
    committed = _complete_all([node.role for node in stored], sequencers)
    reference = next(
        node.role for node in stored if node.role.ordering.has(committed.length, committed.last)
    )
    of = reference.ordering
    copies = [node for node in stored if _is_copy(node.role.ordering, of, committed)]
    return StoredNodes(view, committed, of, copies)


def _is_copy(ordering: Ordering, reference: Ordering, committed: Extent) -> bool:
    """Whether the committed entries that a node has applied are those of the reference."""
    end = min(ordering.position, committed.length)
    last = ordering.reader.lineage.before(end)
    return last is not None and reference.has(end, last)


def _read_journal(
    directory: Path, nodes: Sequence[NodeId], view: View, roles: dict[NodeId, Role]
) -> JournalReader:
    """Read a journal into new roles of its nodes; a missing journal leaves them empty."""
    config = Config()
    made = {node: _role_of(node, view, config) for node in nodes}
    roles.update(made)
    segment_bytes = config.node.journal.segment_bytes
    reader = JournalReader(directory, segment_bytes=segment_bytes, running=True)
    if directory.is_dir():
        check_version(directory)
        try:
            read(reader, {stream_of(node): role for node, role in made.items()})
            changed = reader.changed()
        except FileNotFoundError as error:
            raise FilesChangedError from error
        except DataLossError as error:
            if reader.changed():
                raise FilesChangedError from error
            raise
        if changed:
            raise FilesChangedError
    return reader


def _role_of(node: NodeId, view: View, config: Config) -> Role:
    if node in view.sequencers:
        return Sequencer(node, [view], config)
    return StorageNode(node, [view], config)


# --- what is committed


def _complete_all(nodes: Sequence[StorageNode], sequencers: Sequence[Sequencer]) -> Extent:
    """Give all nodes the committed entries that they lack; return the extent of the metalog.

    Storage nodes apply published entries only, so every entry that a storage node has applied is
    committed. The sequencers may show that further entries are committed. Storage nodes may also be
    ahead of the sequencers, because storage nodes were read later.

    Raises:
        DataDirectoryError: no node has the whole order.
    """
    applied = max((node.ordering.extent for node in nodes), default=Extent(Epoch(0), 0))
    voters = [sequencer.metalog for sequencer in sequencers if not sequencer.learner]
    if len(voters) < majority(sequencers):
        return applied
    source = max(voters, key=lambda metalog: metalog.stored_extent)
    length = _committed_length(source, voters, majority(sequencers))
    if source.fits(applied.length, applied.last):
        length = max(length, applied.length)
    committed = Extent(source.epoch_before(length), length)
    for node in nodes:
        _complete(node, source, committed)
    if any(node.ordering.position >= length for node in nodes):
        return committed
    raise DataDirectoryError(
        "No storage node of the data directory has the whole order of the log. Restore its "
        "directory from a copy, or start the platform, which fetches what is missing."
    )


def _committed_length(
    source: StoredMetalog, voters: Sequence[StoredMetalog], needed: int
) -> MetalogPosition:
    """Return how many entries of the greatest copy are committed, at least.

    Entries that a majority has are committed if the last of them is of the newest term: each later
    primary then adopts them (Raft 5.4.2).
    """
    known = max(source.committed.position, source.base.position)
    equal = sorted((_equal_length(source, other) for other in voters), reverse=True)
    end = equal[needed - 1]
    of_newest_term = end > known and source.epoch_before(end) == source.stored_extent.last
    return end if of_newest_term or needed == 1 else known


def _equal_length(one: StoredMetalog, other: StoredMetalog) -> MetalogPosition:
    """Return how many durable entries two copies have in common, from the first entry on."""
    end, floor = min(one.stored, other.stored), max(one.base.position, other.base.position)
    while end > floor and not other.fits(end, one.epoch_before(end)):
        end = one.agreement(*other.common(end, one.epoch_before(end)))
    return max(end, min(floor, one.stored, other.stored))


def _complete(node: StorageNode, source: StoredMetalog, committed: Extent) -> None:
    """Give a node the committed entries that it lacks. They replace uncommitted entries."""
    metalog, ordering = source, node.ordering
    if ordering.extent >= committed:
        return
    start = max(metalog.agreement(*ordering.extent), metalog.base.position)
    if start > ordering.position:
        return  # its checkpoints are gone: a start would fetch the history from another node
    while start < committed.length:
        end = min(start + _ENTRIES_AT_ONCE, committed.length)
        payload = encode_entries(metalog.page(start, end))
        node.recover(FrameKind.ORDERING, payload, _NOWHERE)
        start = end
