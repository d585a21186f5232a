"""Benchmarks of programs that read a data directory."""
