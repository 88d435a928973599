"""Recurrences with one decay per head."""
