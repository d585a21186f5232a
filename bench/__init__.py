"""Benchmarks, one file per experiment. All use `bench.support.harness`. Run one with `python -m
bench.log_append`.

Every benchmark prints the machine, the commit and the configuration. It runs all sides interleaved
in one run, quotes medians over rounds, and writes raw samples with `--json FILE`.
"""
