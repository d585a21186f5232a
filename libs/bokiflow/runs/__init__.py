"""A run: its records, the state that follows from them, and its execution."""
