"""`python -m indilog.node`: one node of a cluster in a process of its own."""

from indilog.runtime.cluster.node_process import main

if __name__ == "__main__":
    main()
