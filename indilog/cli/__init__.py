"""The command `indilog` (API.md, "First five minutes"): run a platform, deploy and call functions,
read logs.

`up` runs a platform; every other command calls a gateway over HTTP. Each error is one sentence on
standard error. The exit code is 2 for a mistake in the command, and 1 if a correct command failed.
"""


def main() -> None:
    """Run the command that the arguments name."""
    from indilog.cli.commands import run

    run()
