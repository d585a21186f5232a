"""Limits of workflows: how many runs execute at a time, and how many begin in an interval."""
