"""What a person writes: applications, functions, contexts, schedules."""
