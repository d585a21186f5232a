"""Checks the data directory as a whole, because its metadata file and its journals belong together
(ARCHITECTURE 11).

Every arrangement writes the metadata file before the first journal, and never removes it. So if
there are journals without a metadata file, a part of the directory was lost. A start there would
reuse epochs that the journals contain, so it is refused. `assembly`, `node_process` and
`metadata_opening` call the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from indilog.base.errors import DataDirectoryError
from indilog.config import NodeConfig
from indilog.runtime.journal.segment import segment_numbers
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.store import MetadataStore

if TYPE_CHECKING:
    from indilog.runtime.journal.journal import Journal  # a supervisor opens no journal

_MADE: Final = b"made"
_LOST: Final = b"lost"


@contextmanager
def directory_usable(directory: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence about the data directory.

    Raises:
        DataDirectoryError: instead of an `OSError` inside the block.
    """
    try:
        yield
    except FileExistsError as error:
        raise DataDirectoryError(
            f"The data directory {directory} cannot be used: Not a directory; choose another."
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataDirectoryError(
            f"The data directory {directory} cannot be used: {reason}; choose another, or make "
            "room there."
        ) from error


def opened_metadata_file(config: NodeConfig) -> EmbeddedMetadataStore:
    """Open the metadata file of the data directory. A new directory gets a new file.

    Raises:
        DataDirectoryError: the directory cannot be used or is in use. Or its metadata file is
            damaged, has a newer format, or is missing although there are journals.
    """
    directory = config.data_dir
    file = directory / "metadata"
    with directory_usable(directory):
        # Journals are searched before the metadata file. If another process creates the directory
        # meanwhile, it writes the metadata file before its journals.
        journals = _journals(directory)
        if journals and not file.exists():
            raise DataDirectoryError(
                f"{file} is missing, although {directory} has journals (such as "
                f"{journals[0].name}); put it back from a copy of the whole directory, or choose "
                "another directory."
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # only this user may read records
        return EmbeddedMetadataStore(file, config)


def _journals(directory: Path) -> list[Path]:
    """Return the folders below `directory` that hold journal segments."""
    if not directory.is_dir():
        return []
    folders = sorted(path for path in directory.iterdir() if path.is_dir())
    return [folder for folder in folders if segment_numbers(folder)]


async def journal_lost(store: MetadataStore, name: str, journal: Journal) -> bool:
    """Return whether the journal `name` existed at an earlier start and is empty now.

    The store records each journal at its first start. A lost journal counts as lost until it has
    frames again. These frames come from a restored copy, or from a node that can continue without
    its old frames.
    """
    key = f"journal/{name}"
    known = await store.get(key)
    lost = known is not None and (
        journal.created or (known.value == _LOST and journal.holds_nothing())
    )
    value = _LOST if lost else _MADE
    if known is None or known.value != value:
        version = known.version if known is not None else 0
        await store.compare_and_set(key, value, expected_version=version)
    return lost
