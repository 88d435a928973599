"""List, compare and remove runs: `python scripts/runs.py demo`; see --help."""

import sys
from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.cli.runs import names_as_texts, read_runs
from attnbench.settings.runs import RunsSettings


def main(settings: RunsSettings) -> Path:
    """Import what reads folders only after the configuration is checked."""
    from attnbench.report.runs import show_runs

    return show_runs(settings)


if __name__ == "__main__":
    sys.argv[1:] = names_as_texts(sys.argv[1:])
    launch(main, "runs", read=read_runs)
