"""Limits: how many runs of a workflow execute at a time, and how many begin in an interval."""
