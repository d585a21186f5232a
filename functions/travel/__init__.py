"""Hotels and flights, the "travel" workload of the Boki and Beldi papers, as functions and
workflows on the log.

`app` has the functions and workflows, `places` the geography; that is all that the platform needs.
The other modules are for the demo (`python -m functions.travel.demo`).
"""
