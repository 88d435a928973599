"""Operators timed alone, one file per table."""
