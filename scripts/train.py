"""Train one mixer in a language model and evaluate it: `python scripts/train.py attn=gated_deltanet`; see --help."""

from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.report.terminal import print_summary
from attnbench.settings.schema import RunSettings


def main(settings: RunSettings) -> Path:
    """Import the trainer only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.comparison.execute import run

    return run(settings)


if __name__ == "__main__":
    launch(main, "train", print_summary, together=True)
