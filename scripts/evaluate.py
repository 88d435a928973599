"""Evaluate a trained run: `python scripts/evaluate.py run=outputs/... 'eval=[perplexity,recall]'`."""

from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.cli.reading import read_evaluation
from attnbench.report.terminal import print_summary
from attnbench.settings.schema import RunSettings


def main(wanted: tuple[Path, RunSettings]) -> Path:
    """Import the evaluations only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.comparison.execute import evaluate_again

    return evaluate_again(*wanted)


if __name__ == "__main__":
    launch(main, "evaluate", print_summary, read_evaluation)
