"""Reads batches from objects on cold storage, one row group at a time, for `Payloads` (decision
0039).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from indilog.base.errors import MalformedFrameError, NotReadyError
from indilog.base.ids import LocalId
from indilog.kernel.cold_objects import ObjectReader
from indilog.runtime.cold_place import ColdFolder, ColdStoreError, MissingObjectError
from indilog_pipeline.log_image import ColdFile

_OPEN_OBJECTS_MAX: Final = 16
_TIMEOUT_S: Final = 30.0
"""Seconds after which a request to a store over the network fails."""


class ColdPayloads:
    """Caches the most recently used objects, and the last row group read from each."""

    def __init__(self) -> None:
        self._folders: dict[tuple[str, str], ColdFolder] = {}
        self._readers: OrderedDict[ColdFile, ObjectReader] = OrderedDict()
        self._groups: dict[ColdFile, tuple[int, dict[LocalId, bytes]]] = {}

    def close(self) -> None:
        """Close all objects."""
        self._readers.clear()
        self._groups.clear()

    def batch(self, source: ColdFile, first: LocalId) -> memoryview | None:
        """Return the batch of an object that begins at localid `first`; None: it is damaged or
        missing.

        Raises:
            NotReadyError: cold storage does not answer.
        """
        try:
            reader = self._reader(source)
            if (group := reader.group_of(first)) is None:
                return None
            known = self._groups.get(source)
            if known is None or known[0] != group:
                known = self._groups[source] = group, reader.batches(group)
        except (MissingObjectError, MalformedFrameError):
            return None
        except ColdStoreError as error:
            raise NotReadyError(f"Cold storage does not answer ({error}); try again.") from error
        batch = known[1].get(first)
        return memoryview(batch) if batch is not None else None

    def _reader(self, source: ColdFile) -> ObjectReader:
        if (known := self._readers.get(source)) is not None:
            self._readers.move_to_end(source)
            return known
        key = source.place, source.folder
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = ColdFolder(*key, _TIMEOUT_S)
        opened = folder.open(source.name)
        reader = self._readers[source] = ObjectReader(opened.size, source.footer_crc, opened.read)
        if len(self._readers) > _OPEN_OBJECTS_MAX:
            dropped, _ = self._readers.popitem(last=False)
            self._groups.pop(dropped, None)
        return reader
