"""Operators measured alone: one table each."""
