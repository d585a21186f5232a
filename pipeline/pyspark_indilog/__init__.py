"""Makes `spark.read.format("indilog")` work without registration.

PySpark imports every installed module whose name starts with `pyspark_` and registers its
`DefaultSource`. So this package only has the required name; `indilog_pipeline.spark` implements the
data source.
"""

from indilog_pipeline.spark.source import IndilogSource as DefaultSource

__all__ = ["DefaultSource"]
