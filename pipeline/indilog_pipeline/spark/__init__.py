"""The Spark data source `indilog`: logs as DataFrames and streams, and DataFrames as records.

Spark calls `source`. It reads from a running platform (`platform_reads`) or from a data directory
(`directory_reads`); both are a `reading.LogReads`. Importing this package needs no PySpark; its
module `source` does.
"""
