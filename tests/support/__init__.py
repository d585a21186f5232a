"""Support code shared by several tests: logs with faults, drivers of roles, clients, clocks."""
