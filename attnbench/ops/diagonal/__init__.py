"""Memories that decay by a number for every key channel."""
