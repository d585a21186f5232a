"""A social network as functions on the log: the "retwis" workload of the Boki and IndiLog papers.

Only `app`, which has the functions, is deployed. The other modules are for the demo (`python -m
functions.social.demo`): a graph of friends, the behaviour of clients, and the final check.
"""
