"""A run: its records, their fold, and its execution."""
