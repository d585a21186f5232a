"""`python -m indilog_compute.workers` runs a function worker; `process` starts this program."""

from indilog.base.slim_imports import import_structlog


def main() -> None:
    """Run a worker until its compute node ends; `starting.worker_process` reads the arguments."""
    import_structlog()
    from indilog_compute.workers.starting.worker_process import main as worker_main

    worker_main()


if __name__ == "__main__":
    main()
