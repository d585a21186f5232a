"""The Spark data source `indilog`: logs as DataFrames and streams, and DataFrames as records.

`source` is what Spark talks to. A read comes from a running platform (`platform_reads`) or from a
data directory (`directory_reads`); both are a `reading.LogReads`. Importing this package needs no
PySpark; its module `source` does.
"""
