"""What the author of an application uses: applications, functions, contexts, schedules."""
