"""Memories that decay by one number a head."""
