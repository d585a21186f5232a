"""Starts worker processes: selects their environment (`environment`), and has the program that they
run (`worker_process`).
"""
