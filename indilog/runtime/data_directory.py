"""The data directory as a whole: its metadata file and its journals belong together (ARCHITECTURE
11).

Both arrangements write the metadata file before the first journal, and never remove it. So journals
without a metadata file are a directory of which somebody lost a part, not a new one: to start there
would give epochs out again that the journals know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from indilog.config import NodeConfig
from indilog.errors import DataDirectoryError
from indilog.runtime.metadata import EmbeddedMetadataStore
from indilog.runtime.segment import segment_numbers


@contextmanager
def directory_usable(directory: Path) -> Iterator[None]:
    """Say in one sentence that the system does not let us keep data there.

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


def opened_metadata(config: NodeConfig) -> EmbeddedMetadataStore:
    """Open the metadata store of the data directory; a new directory gets a new one.

    Raises:
        DataDirectoryError: the directory cannot be used, is in use, or its metadata file is
            damaged, of a newer format, or gone although there are journals.
    """
    directory = config.data_dir
    file = directory / "metadata"
    with directory_usable(directory):
        # In this order: whoever makes the directory at the same time writes the file first.
        journals = _journals(directory)
        if journals and not file.exists():
            raise DataDirectoryError(
                f"{file} is missing, although {directory} has journals (such as "
                f"{journals[0].name}); put it back from a copy of the whole directory, or choose "
                "another directory."
            )
        return EmbeddedMetadataStore(file, config)


def _journals(directory: Path) -> list[Path]:
    """Return the folders below `directory` that hold journal segments."""
    if not directory.is_dir():
        return []
    folders = sorted(path for path in directory.iterdir() if path.is_dir())
    return [folder for folder in folders if segment_numbers(folder)]
