"""Verdicts on scores: statistics over seeds, ranking, and the summary of all variants.

Rows in, figures and verdicts out: nothing here measures, prints or writes a file.
"""
