"""Compare variants by a plan and write a report: `python scripts/compare.py plan=demo`; see --help."""

from pathlib import Path

from attnbench.cli.compose import compose
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_comparison
from attnbench.settings.schema import ComparisonSettings


def main(settings: ComparisonSettings) -> Path:
    """Import the comparison only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.comparison.compare import compare

    return compare(settings, compose)


if __name__ == "__main__":
    launch(main, "compare", read=read_comparison)
