"""IndiLog: stateful serverless functions on a shared log."""
