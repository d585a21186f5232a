"""The Spark data source `indilog`: logs as DataFrames and streams, and DataFrames as records.

Spark calls `source`. Reads go to a running platform (`platform_reads`) or to a data directory
(`directory_reads`); both implement `reading.LogReads`. Writes go through `writing`. Importing this
package needs no PySpark, but importing its module `source` does.
"""
