"""All BokiStore objects as of one place of the log, as a DataFrame: a consistent snapshot.

BokiStore itself replays the objects, with its own rules for transactions, checkpoints and trims. It
replays a `DirectoryLog`, or a log of a running platform. The job `objects` of `jobs` and users'
programs call `objects`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from bokistore import Store
from bokistore.collection import find_collected_end
from bokistore.records import object_of
from bokistore.tags import is_own
from indilog.base.errors import ConfigError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log
from indilog_pipeline.analytics.directory_log import DirectoryLog
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import read_records
from indilog_pipeline.spark.connection import connected, with_token
from indilog_pipeline.spark.options import Access

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ValueT = TypeVar("_ValueT")
_PAGE: Final = 1000
_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("log", pa.string()),
    pa.field("name", pa.string()),
    pa.field("version", pa.int64()),
    pa.field("tags", pa.list_(pa.field("element", pa.string()))),
    pa.field("value", pa.string()),
]
SCHEMA: Final = pa.schema(_FIELDS)
"""The columns of an object.

`version` is the seqnum of the object's last committed write. `tags` are the tags of its last `put`.
`value` is the object's JSON without these tags.
"""


def objects(
    session: SparkSession,
    path: str = "",
    *,
    url: str = "",
    log: str | None = None,
    at: SeqNum | None = None,
) -> DataFrame:
    """Return the objects that exist as of the record at `at`, one row each (`SCHEMA`).

    The driver replays the logs one by one. If the driver reads a data directory, it holds the
    records of one log in memory.

    Args:
        session: Spark session of the DataFrame.
        path: data directory to read, also beside a running platform.
        url: platform to read through, instead of `path`.
        log: log of the objects; None: every log of the directory. Required with `url`.
        at: seqnum of the last record that counts; None: the end of the log now.

    Raises:
        ConfigError: both or none of `path` and `url` are given, or `url` is given without `log`.
        ValueError: `at` is beyond the end of the log.
        TrimmedError: BokiStore's garbage collection, or a trim, has removed history that `at`
            needs.
        DataLossError: a record of the log is lost.
    """
    return session.createDataFrame(object_table(path, url=url, log=log, at=at))


def object_table(
    path: str = "", *, url: str = "", log: str | None = None, at: SeqNum | None = None
) -> pa.Table:
    """Return the objects as an Arrow table, without Spark; see `objects`."""
    if bool(path) == bool(url):
        raise ConfigError("Give a data directory (path) or a platform (url), not both.")
    rows: list[dict[str, object]] = []
    if url:
        if log is None:
            raise ConfigError("A read through a platform is of one log: give log.")
        with connected(with_token(Access(url)), waits=False) as platform:
            rows = platform.ask(partial(_rows, platform.log(log), at))
    else:
        image = LogImage.read(Path(path))
        for name in [log] if log is not None else _logs_in(image):
            rows += _result(_rows(DirectoryLog(image, name), at))
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _logs_in(image: LogImage) -> Sequence[str]:
    """Return the names of the logs that have objects, in order."""
    found: set[str] = set()
    for batch in read_records(image, columns=["log", "tag_names"]):
        tags = batch.column("tag_names")
        with_object = pc.list_parent_indices(tags).filter(
            pc.starts_with(pc.list_flatten(tags), "store:")
        )
        found.update(map(str, batch.column("log").take(with_object).unique().to_pylist()))
    return sorted(found)


async def _rows(log: Log, at: SeqNum | None) -> list[dict[str, object]]:
    store = Store(log)
    async with store.snapshot() if at is None else store.at(at) as snapshot:
        end = snapshot.end
        assert end is not None, "an entered snapshot has a seqnum"
        rows: list[dict[str, object]] = []
        for name in await _names(log):
            obj = await snapshot.get(name)
            if obj.exists:
                value = msgspec.json.encode(obj.value).decode()
                row = {"name": name, "version": obj.view.version, "value": value}
                rows.append({"log": log.name, "tags": list(obj.tags), **row})
    # Below this seqnum, objects may have existed that no record names any more.
    if end and end < (collected := await find_collected_end(log)):
        raise TrimmedError(collected)
    await log.read_next(None, max(end - 1, 0))
    return rows


async def _names(log: Log) -> list[str]:
    """Return the sorted names of all objects of a log. The names include objects whose remaining
    history begins after the place of the snapshot, because their earlier history may be trimmed.
    """
    names: set[str] = set()
    start = 0
    while True:
        try:
            page = await log.read_range(None, start, limit=_PAGE)
        except TrimmedError as error:
            start = error.first_seqnum
            continue
        if not page:
            return sorted(names)
        for record in page:
            written = (object_of(tag) for tag in record.tags if isinstance(tag, str))
            names.update(name for name in written if name is not None and not is_own(name))
        start = page[-1].seqnum + 1


def _result(coroutine: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return the result of a coroutine that awaits only logs of a directory, so it never
    suspends.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: _ValueT = stop.value
        return result
    raise AssertionError("logs of a directory await nothing")
