"""Recurrences with one decay per key channel."""
