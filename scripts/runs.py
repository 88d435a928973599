"""List, compare and remove runs: `python scripts/runs.py demo`; see --help."""

from attnbench.cli.commands import runs

if __name__ == "__main__":
    runs()
