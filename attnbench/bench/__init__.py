"""Operator tables: one file each."""
