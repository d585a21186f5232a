"""Writes a DataFrame as records of a log: tasks stage chunks, and the driver commits them
(`exactly_once`). `source` gives the writers to Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from indilog.base.errors import ConfigError, InvalidTagError
from indilog.base.log import Entry, check_log_name
from indilog_pipeline.spark.connection import connected, with_token
from indilog_pipeline.spark.exactly_once import (
    BatchCommit,
    StagedChunk,
    chunks_of,
    own_tag,
    stage,
    staging_log,
)
from indilog_pipeline.spark.options import Access, integer_option

_DATA: Final = "data"
_TAGS: Final = "tag_names"
_TYPES: Final = {_DATA: ("binary", "string"), _TAGS: ("array<string>",)}
_KNOWN: Final = ("url", "token", "ca", "log", "writer_id", "batch", "checkpointlocation", "path")
_BATCH_MAX: Final = 2**62


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of a write.

    Attributes:
        access: the platform to write through, with its token.
        log: name of the log that gets the records.
        writer: name of the writer, unique among the writers of the log.
        batch: number of a batch write; None: a stream numbers its batches.
    """

    access: Access
    log: str
    writer: str
    batch: int | None

    @property
    def staging(self) -> str:
        """The log in which this writer stages records."""
        return staging_log(self.log, self.writer)


def write_options(
    given: Mapping[str, str], schema: Iterable[tuple[str, str]], *, overwrite: bool, streams: bool
) -> WriteOptions:
    """Return checked options of a write.

    Raises:
        ConfigError: an option or a column is missing, not known or of a wrong type.
    """
    for name in given:
        if name.lower() not in _KNOWN:
            raise ConfigError(f"There is no option {name} of a write.")
    if overwrite:
        raise ConfigError('A log only grows: write with mode("append").')
    _check_columns(dict(schema))
    for name, meaning in (("url", "the platform"), ("log", "the log"), ("writer_id", "the writer")):
        if not given.get(name):
            raise ConfigError(f"Give option {name}: it names {meaning} of this write.")
    batch = integer_option(given, "batch", 0, _BATCH_MAX)
    if streams == (batch is not None):
        raise ConfigError(
            "A stream numbers its batches by itself: leave option batch out."
            if streams
            else "Give option batch, a number: a batch is written only if the writer has finished "
            "none of this number or a greater one."
        )
    access = Access(given["url"], given.get("token", ""), given.get("ca", ""))
    log = check_log_name(given["log"])
    staging_log(log, given["writer_id"])
    return WriteOptions(access=with_token(access), log=log, writer=given["writer_id"], batch=batch)


def _check_columns(types: Mapping[str, str]) -> None:
    for name, spark_type in types.items():
        if name not in _TYPES:
            raise ConfigError(
                f"There is no column {name} to write; the columns are {_DATA} and {_TAGS}."
            )
        if spark_type not in _TYPES[name]:
            raise ConfigError(f"Column {name} is {' or '.join(_TYPES[name])}, not {spark_type}.")
    if _DATA not in types:
        raise ConfigError(f"Column {_DATA} is missing: it has the bytes of each record.")


class StagedChunks(WriterCommitMessage):
    """The chunks that a task staged."""

    def __init__(self, chunks: Sequence[StagedChunk]) -> None:
        self.chunks = tuple(chunks)


class _Staging:
    """The code shared by batch and streaming writes."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the records of one partition."""
        options = self._options
        chunks = chunks_of(_entries(iterator, own_tag(options.writer)))
        if (first := next(chunks, None)) is None:
            return StagedChunks(())
        with connected(options.access) as platform:
            log = platform.log(options.staging)
            # A chunk that is staged twice is harmless, because the marker names one copy.
            return StagedChunks(
                [
                    platform.ask(partial(stage, log, chunk), may_repeat=True)
                    for chunk in itertools.chain([first], chunks)
                ]
            )

    def _commit(self, messages: Iterable[WriterCommitMessage | None], batch: int) -> None:
        options = self._options
        chunks: list[StagedChunk] = []
        for message in messages:
            assert isinstance(message, StagedChunks), "only complete batches are committed"
            chunks += message.chunks
        with connected(options.access) as platform:
            commit = BatchCommit(
                platform.log(options.staging),
                platform.log(options.log),
                writer=options.writer,
                batch=batch,
            )
            platform.ask(partial(commit.run, chunks), may_repeat=True)


class LogWriter(_Staging, DataSourceArrowWriter):
    """Writes a DataFrame, once.

    Raises:
        NotReadyError, UnauthorizedError: the platform does not answer, or refuses the token.
    """

    def __init__(self, options: WriteOptions) -> None:
        super().__init__(options)
        with connected(options.access, waits=False):
            # Report a wrong URL or token at once: tasks would retry, because a platform may
            # restart.
            pass

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the chunks that all tasks staged, unless the batch was written before."""
        assert self._options.batch is not None, "a batch write has a number"
        self._commit(messages, self._options.batch)


class LogStreamWriter(_Staging, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the chunks that all tasks of a micro-batch staged, unless the micro-batch was
        written before.
        """
        self._commit(messages, batchId)


def _entries(batches: Iterable[pa.RecordBatch], reserved: str) -> Iterator[Entry]:
    """Yield the rows as records.

    Raises:
        ConfigError: a row has no data, or a tag is null.
        InvalidTagError: a row has a tag that is reserved for the chunks of this writer.
    """
    for batch in batches:
        data = batch.column(_DATA).to_pylist()
        tagged = _TAGS in batch.schema.names
        tags = batch.column(_TAGS).to_pylist() if tagged else [None] * len(data)
        for value, names in zip(data, tags, strict=True):
            if value is None:
                raise ConfigError(f"Column {_DATA} of a row is null; an empty record has ''.")
            for name in names or ():
                if name is None:
                    raise ConfigError(f"A tag in column {_TAGS} of a row is null: leave it out.")
                if name == reserved or name.startswith(f"{reserved}:"):
                    raise InvalidTagError(
                        f"Tags that start with {reserved!r} are reserved: leave them out."
                    )
            yield Entry(value.encode() if isinstance(value, str) else value, tuple(names or ()))
