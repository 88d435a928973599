"""Rows to a page and a terminal: summaries, plots, one self-contained HTML page, and the mirror of it in wandb.

Nothing here measures or decides a verdict, and nothing before it imports the plotting library.
"""
