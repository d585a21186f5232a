"""What the author of an application uses: applications, functions, contexts, schedules.

`indilog` exports these names. Worker processes (`indilog_compute.workers`) load the applications
and run their functions.
"""
