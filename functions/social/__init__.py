"""A social network, the "retwis" workload of the Boki and IndiLog papers, as functions on the log.

`app` has the functions and is all that the platform needs; the other modules are for the demo: a
graph of friends, a load generator, a check of the result against the log, and the command that
runs them all (`python -m functions.social.demo`).
"""
