"""Command line to settings, and mistakes to one line."""
