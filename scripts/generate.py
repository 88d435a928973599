"""Continue a prompt with the model of a run: `echo 'the' | python scripts/generate.py run=outputs/...`; see --help."""

from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.cli.reading import read_generation
from attnbench.settings.schema import GenerationSettings, RunSettings


def main(wanted: tuple[GenerationSettings, RunSettings]) -> Path:
    """Import the model only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.cli.commands import write_text

    return write_text(*wanted)


if __name__ == "__main__":
    launch(main, "generate", read=read_generation)
