"""Support code of the benchmarks: measurements, platforms, servers, tables."""
