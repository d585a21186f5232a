"""What authors of libraries on the log use beside the public API."""
