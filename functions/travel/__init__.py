"""Hotels and flights, the "travel" workload of the Boki and Beldi papers, as functions and
workflows on the log.

The platform needs only `app`, with the functions and workflows, and `places`, with the geography.
The other modules are for the demo (`python -m functions.travel.demo`).
"""
