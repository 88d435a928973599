"""Rows of an experiment as one self-contained HTML page."""

from attnbench.report.page import write_report

__all__ = ["write_report"]
