"""Appends with a condition (decision 0043)."""
