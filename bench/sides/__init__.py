"""The systems that benchmarks compare: their servers, clients and applications."""
