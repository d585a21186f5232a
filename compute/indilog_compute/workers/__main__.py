"""`python -m indilog_compute.workers` runs a function worker in its own process."""

from indilog.base.slim_imports import import_structlog


def main() -> None:
    """Run the worker that the arguments name."""
    import_structlog()
    from indilog_compute.workers.starting.worker_process import main as worker_main

    worker_main()


if __name__ == "__main__":
    main()
