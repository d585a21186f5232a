"""The shells: they drive roles on an event loop, a disk and sockets, and processes on a machine
(ARCHITECTURE 5). Only code here (and in front of people) knows time, threads and I/O.
"""
