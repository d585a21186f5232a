"""Benchmarks of clusters: compute nodes, metadata stores, cold storage."""
