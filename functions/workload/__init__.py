"""What the applications share when they are shown, measured and checked; no application itself.

`load` has clients over HTTP, `replay` the check against the log, `demonstration` puts both together
with progress bars and a table. An application says what is its own: what it loads, what its clients
ask for, and what must hold finally.
"""
