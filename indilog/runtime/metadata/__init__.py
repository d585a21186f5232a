"""The metadata store: its interface, the embedded one and its service, and ZooKeeper."""
