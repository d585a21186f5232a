"""The code that demos, benchmarks and checks of the applications share.

`load` has the clients over HTTP, `replay` the check against the log. `demonstration` runs both,
with progress bars and a table. An application adds its data, the requests of its clients, and its
guarantees.
"""
