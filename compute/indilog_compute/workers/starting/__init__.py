"""Starts worker processes: the selection of their environment, and the program that they run."""
