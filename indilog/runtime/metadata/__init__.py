"""The metadata store: its interface, the embedded store and its service, and ZooKeeper."""
