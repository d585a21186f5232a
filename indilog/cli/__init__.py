"""The command `indilog` (API.md, "First five minutes"): run a platform, deploy and call functions,
read logs.

`up` and `node` run a platform. `backup`, `rebuild-index`, `analyse` and `export` read a data
directory, and `mirror` copies between platforms. Most other commands call a gateway over HTTP. Each
error is one sentence on standard error. The exit code is 2 for a mistake in the command, and 1 if a
correct command failed.
"""


def main() -> None:
    """Run the command that the arguments name."""
    from indilog.cli.commands import run

    run()
