"""Benchmarks of kinds of log."""
