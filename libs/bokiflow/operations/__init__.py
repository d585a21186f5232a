"""What a workflow can do: steps, calls, children, signals, timers, transactions."""
