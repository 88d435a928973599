"""The report: tables, charts and one self-contained HTML page from rows; also the terminal's tables and wandb.

Nothing here measures or decides a verdict. Only this package imports the plotting library.
"""
