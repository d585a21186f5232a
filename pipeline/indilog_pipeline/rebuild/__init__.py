"""Rebuilds the index snapshots of a data directory from its records, or compares them with the
records (thesis 5.6.2, decisions 0035 and 0041).

`run.rebuild_index` plans (`plan`), lets an engine make the rows of each index shard (`local`: this
process, `spark_engine`: a Spark session), and installs the snapshots. `verify.verify_index`
compares snapshots. The modules here need no PySpark, except `spark_engine`.
"""
