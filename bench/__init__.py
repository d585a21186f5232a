"""Benchmarks: one file per experiment, all on `bench.support.harness`. Run as `python -m
bench.log_append`.

Every benchmark prints the machine, the commit and the configuration. It runs all sides interleaved
in one run, quotes medians over rounds, and writes raw samples with `--json FILE`.
"""
