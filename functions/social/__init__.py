"""A social network, the "retwis" workload of the Boki and IndiLog papers, as functions on the log.

`app` has the functions and is all that the platform needs; the other modules are for the demo: a
graph of friends, what clients do and what must hold finally, and the command that runs them all
(`python -m functions.social.demo`).
"""
