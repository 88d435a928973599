"""Memories with a decay of its own for every key channel, with the delta rule or none."""
