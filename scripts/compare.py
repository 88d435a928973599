"""Compare variants by a plan and write a report: `python scripts/compare.py plan=demo`; see --help."""

from attnbench.cli.commands import compare

if __name__ == "__main__":
    compare()
