"""A program with two queries that never end: a log to Parquet files, and the log to another log.

`python copy_program.py URL FOLDER LOG` runs them until it is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from indilog_pipeline.session import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITER = "copy"


def run(spark: SparkSession, url: str, folder: str, log: str, *, finishes: bool) -> None:
    """Run the queries until they end."""
    frame = (
        spark.readStream.format("indilog").option("url", url).option("log", log)
        .option("batch_records_max", "1000000" if finishes else "100")
        .schema("seqnum bigint, data binary, tag_names array<string>").load()
    )  # fmt: skip
    to_files = (
        frame.writeStream.format("parquet").option("path", str(Path(folder, "parquet")))
        .option("checkpointLocation", str(Path(folder, "to-files")))
    )  # fmt: skip
    to_log = (
        frame.select("data", "tag_names").writeStream.format("indilog").option("url", url)
        .option("log", f"{log}-copy").option("writer_id", WRITER)
        .option("checkpointLocation", str(Path(folder, "to-log")))
    )  # fmt: skip
    if finishes:
        to_files, to_log = (w.trigger(availableNow=True) for w in (to_files, to_log))
    queries = [to_files.start(), to_log.start()]
    sys.stdout.write("running\n")
    sys.stdout.flush()
    for query in queries:
        query.awaitTermination()


def main() -> None:
    """Run the queries in a session of their own."""
    url, folder, log = sys.argv[1:]
    spark = start("copy", master="local[2]", memory="512m", short=True)
    run(spark, url, folder, log, finishes=False)


if __name__ == "__main__":
    main()
