"""Continues a prompt with the model of a run: `echo 'the' | python scripts/generate.py run=outputs/...`; see --help."""

from pathlib import Path

from attnbench.config import launch
from attnbench.reading import read_generation
from attnbench.settings import GenerationSettings, RunSettings


def main(wanted: tuple[GenerationSettings, RunSettings]) -> Path:
    """Imports the model only once the configuration stands: torch takes longer to load than all its checks."""
    from attnbench.writing import write_text

    return write_text(*wanted)


if __name__ == "__main__":
    launch(main, "generate", read=read_generation)
