"""Programs for those who work on the project: nothing of it is installed."""
