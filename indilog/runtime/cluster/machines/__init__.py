"""A cluster whose processes run on several machines, without a supervisor: `indilog node` (decision
0057).

- `registration`: which process of the cluster a machine runs, and the addresses of all of them
- `machine_members`: how nodes join and leave
- `status_keys`: the status of the other machines' nodes
- `service_manager`: tells systemd that the process is ready and lives
- `machine_process`: runs the process
"""
