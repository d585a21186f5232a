"""The metadata store: its interface, the embedded store and its service, and ZooKeeper.

`indilog.runtime.cluster` keeps views, addresses and epochs in it.
"""
