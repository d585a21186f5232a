"""The command `indilog` (API.md, "First five minutes"): run a platform, deploy and call functions,
look at logs.

`up` runs a platform; every other command is a caller of a gateway's HTTP interface. A person's
mistake is one sentence on standard error and exit code 2; what failed though nothing was wrong with
the command is one sentence and exit code 1.
"""


def main() -> None:
    """Run the command that the arguments name."""
    from indilog.cli.commands import run

    run()
