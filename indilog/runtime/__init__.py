"""The shell, which drives roles on an event loop, a disk and sockets; and the processes of a
machine.

Only this package and the user interfaces use time, threads and I/O (ARCHITECTURE 5).
"""
