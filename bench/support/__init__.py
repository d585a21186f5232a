"""What benchmarks share: measuring, platforms to measure, tables, published figures."""
