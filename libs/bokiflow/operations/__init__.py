"""The operations of a workflow: calls, children, signals, timers, locks, transactions."""
