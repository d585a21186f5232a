"""What everything else stands on: identifiers, errors, settings, the interface of a log."""
