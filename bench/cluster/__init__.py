"""Benchmarks of what processes of a cluster agree on outside the log."""
