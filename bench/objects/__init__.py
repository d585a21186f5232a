"""Benchmarks of objects in special situations."""
