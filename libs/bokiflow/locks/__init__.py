"""Fenced locks with leases."""
