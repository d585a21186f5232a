"""Benchmark of many runs, messages and objects."""
