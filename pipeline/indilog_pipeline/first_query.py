"""A first query with Spark over a data directory, which `./start` runs at its end.

Usage: `python -m indilog_pipeline.first_query --data DIRECTORY`.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from indilog.base.errors import IndilogError
from indilog_pipeline.session import start
from indilog_pipeline.spark_errors import sentence_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERY: Final = """\
SELECT log, count(*) AS records, sum(length(data)) AS bytes, max(ordered_at) AS newest
FROM records GROUP BY log ORDER BY records DESC"""
_ROWS: Final = 10


def records_by_log(spark: SparkSession, data: str) -> list[tuple[str, int, int, str]]:
    """Return log, records, bytes and newest record of each log in a data directory."""
    records = spark.read.format("indilog").option("path", data)
    records.schema("log string, data binary, ordered_at timestamp").load().createOrReplaceTempView(
        "records"
    )
    rows = spark.sql(QUERY).limit(_ROWS).collect()
    return [(row.log, row.records, row.bytes, f"{row.newest:%H:%M:%S}") for row in rows]


def main() -> None:
    """Run the query, and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="data directory of a platform")
    data = parser.parse_args().data
    try:
        rows = records_by_log(start("first query", master="local[2]", short=True), data)
    except IndilogError as error:
        sys.exit(str(error))
    except Exception as error:
        if (sentence := sentence_in(str(error))) is None:
            raise
        sys.exit(sentence)
    lines = [f"\nSpark over {data} (docs/SPARK.md):\n\n{QUERY}\n"]
    lines.append(f"{'log':<24}{'records':>10}{'bytes':>14}  newest")
    lines += [f"{log:<24}{count:>10,}{size:>14,}  {newest}" for log, count, size, newest in rows]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
