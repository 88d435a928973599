"""Command line to settings, and mistakes to one line; only this package imports Hydra."""
