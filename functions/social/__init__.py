"""A social network, the "retwis" workload of the Boki and IndiLog papers, as functions on the log.

The platform needs only `app`, which has the functions. The other modules are for the demo (`python
-m functions.social.demo`): a graph of friends, the behaviour of clients, and the final check.
"""
