"""Test published claims: `python scripts/findings.py conv_recall`; see --help."""

from attnbench.cli.commands import findings

if __name__ == "__main__":
    findings()
