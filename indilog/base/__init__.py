"""What everything else builds on: identifiers, errors, settings, the interface of a log."""
