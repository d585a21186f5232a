"""Code shared by the demos, benchmarks and checks of the applications.

`load` runs clients over HTTP, and `replay` checks the result against the log. `demonstration` runs
both, with progress bars and a table. An application adds its data, the requests of its clients, and
its guarantees.
"""
