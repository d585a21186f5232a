"""Hotels and flights as functions and workflows on the log: the "travel" workload of the Boki and
Beldi papers.

Only `app`, with the functions and workflows, and `places`, with the geography, are deployed. The
other modules are for the demo (`python -m functions.travel.demo`).
"""
