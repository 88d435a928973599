"""Write the report of an experiment: `python scripts/report.py outputs/<experiment>`."""

from attnbench.cli.commands import report

if __name__ == "__main__":
    report()
