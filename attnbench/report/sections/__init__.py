"""Sections of a report, and the words that they share."""
