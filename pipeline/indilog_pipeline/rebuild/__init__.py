"""Rebuilds the index snapshots of a data directory from its records, or compares them with the
records (thesis 5.6.2, decisions 0035 and 0041).

`run.rebuild_index` plans the rebuild (`plan`), lets an engine write the snapshot of each index
shard, and installs the snapshots. The engine `local` is this process; the engine `spark_engine` is
a Spark session. `verify.verify_index` compares snapshots. Only `spark_engine` needs PySpark. The
command `indilog rebuild-index` calls this package.
"""
