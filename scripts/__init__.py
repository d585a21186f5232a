"""Programs for contributors; none is installed."""
