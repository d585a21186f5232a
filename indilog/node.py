"""`python -m indilog.node` runs one node of a cluster in its own process.

The supervisor of `indilog up --processes` starts such processes.
"""

from indilog.base.slim_imports import import_structlog


def main() -> None:
    """Run the node that the arguments name."""
    import_structlog()
    from indilog.runtime.cluster.node_process import main as node_main

    node_main()


if __name__ == "__main__":
    main()
