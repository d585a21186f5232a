"""`python -m indilog.node` runs one node of a cluster in its own process."""

from indilog.runtime.cluster.node_process import main

if __name__ == "__main__":
    main()
