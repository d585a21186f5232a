"""One run of a workflow: its records, the state that follows from them, and its execution."""
