"""What several tests share: logs with faults, drivers of roles, clients, clocks."""
