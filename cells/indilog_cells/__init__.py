"""Logs over write-once cells, such as objects of an object store (decisions 0076 and 0077).

A *cell* is a place that can be written once. The cells of a log are numbered from 0, and their
order is the order of the log.
"""
