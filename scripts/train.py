"""Trains one mixer in a language model and evaluates it: `python scripts/train.py attn=gated_deltanet`; see --help."""

from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.report.terminal import print_summary
from attnbench.settings.schema import RunSettings


def main(settings: RunSettings) -> Path:
    """Imports the trainer only once the configuration stands: torch takes longer to load than all its checks."""
    from attnbench.comparison.execute import run

    return run(settings)


if __name__ == "__main__":
    launch(main, "train", print_summary)
