"""Command line to settings, and mistakes to one line.

Hydra is imported here alone. Scripts call `launch` with a function of plain settings; no number is made here.
"""
