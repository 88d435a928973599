"""Evaluates what was trained before: `python scripts/evaluate.py run=outputs/... 'eval=[perplexity,recall]'`."""

from pathlib import Path

from attnbench.config import launch
from attnbench.reading import read_evaluation
from attnbench.settings import RunSettings
from attnbench.terminal import print_summary


def main(wanted: tuple[Path, RunSettings]) -> Path:
    """Imports the evaluations only once the configuration stands: torch takes longer to load than all its checks."""
    from attnbench.run_model import evaluate_again

    return evaluate_again(*wanted)


if __name__ == "__main__":
    launch(main, "evaluate", print_summary, read_evaluation)
