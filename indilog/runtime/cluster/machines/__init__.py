"""A cluster whose processes run on several machines, without a supervisor: `indilog node` (decision
0057).

- `registration`: which process of the cluster a machine runs, and the addresses of all processes
- `machine_members`: how nodes join and leave
- `status_keys`: the status of the nodes on other machines
- `service_manager`: notifies systemd that the process is ready and runs
- `machine_process`: runs the process
"""
