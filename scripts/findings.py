"""Decide published claims: `python scripts/findings.py conv_recall`; see --help."""

import sys
from pathlib import Path

from attnbench.cli.compose import compose
from attnbench.cli.findings import named_words, read_findings
from attnbench.cli.launch import launch
from attnbench.settings.finding import FindingSettings, FindingsSettings


def main(wanted: tuple[FindingsSettings, list[FindingSettings]]) -> Path:
    """Import the comparison only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.comparison.findings import run_findings

    return run_findings(*wanted, compose)


if __name__ == "__main__":
    sys.argv[1:] = named_words(sys.argv[1:])
    launch(main, "findings", read=read_findings)
