"""What may be asked for: settings, their rules, errors. Nothing here loads torch."""
