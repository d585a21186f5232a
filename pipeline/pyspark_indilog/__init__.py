"""Makes `spark.read.format("indilog")` work without registration.

PySpark imports every installed module whose name starts with `pyspark_` and registers its
`DefaultSource`. So this package has only that name; the data source is in `indilog_pipeline.spark`.
"""

from indilog_pipeline.spark.source import IndilogSource as DefaultSource

__all__ = ["DefaultSource"]
