"""`python -m indilog` is the command `indilog`."""

from indilog.cli import main

main()
