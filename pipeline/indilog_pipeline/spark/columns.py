"""The columns of a record, as Spark and as Arrow types (docs/SPARK.md, "Columns")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from indilog.base.errors import ConfigError


class Column(NamedTuple):
    """One column: its Spark type as DDL, and its Arrow type."""

    spark: str
    arrow: pa.DataType


_TIME: Final = pa.timestamp("us", tz="UTC")

COLUMNS: Final[dict[str, Column]] = {
    "seqnum": Column("bigint", pa.int64()),
    "ordered_at": Column("timestamp", _TIME),
    "time": Column("timestamp", _TIME),
    "log": Column("string", pa.string()),
    "tags": Column("array<bigint>", pa.list_(pa.field("element", pa.int64()))),
    "tag_names": Column("array<string>", pa.list_(pa.field("element", pa.string()))),
    "data": Column("binary", pa.binary()),
    "shard": Column("int", pa.int32()),
    "localid": Column("bigint", pa.int64()),
    "position": Column("bigint", pa.int64()),
}
"""All columns of a record, in the order of the schema."""
GAPS: Final[dict[str, Column]] = {
    "kind": Column("string", pa.string()),
    "start": Column("bigint", pa.int64()),
    "end": Column("bigint", pa.int64()),
}
"""The columns of `option("rows", "gaps")`."""


def ddl(columns: dict[str, Column]) -> str:
    """Return the columns as a schema in Spark's DDL."""
    return ", ".join(f"`{name}` {column.spark}" for name, column in columns.items())


def arrow_schema(columns: dict[str, Column], names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of the columns `names`, in that order."""
    return pa.schema([pa.field(name, columns[name].arrow) for name in names])


def check_columns(columns: dict[str, Column], given: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the columns that a schema asks for.

    Args:
        columns: columns that can be read.
        given: name and Spark type of each column of the schema.

    Raises:
        ConfigError: the schema is empty, or a column is unknown or has another type.
    """
    names = []
    for name, spark_type in given:
        if name not in columns:
            raise ConfigError(f"There is no column {name}; the columns are {', '.join(columns)}.")
        if spark_type != columns[name].spark:
            raise ConfigError(f"Column {name} is {columns[name].spark}, not {spark_type}.")
        names.append(name)
    if not names:
        raise ConfigError(f"The schema names no column; the columns are {', '.join(columns)}.")
    return names
