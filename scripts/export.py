"""Make a folder of a run for another library: `python scripts/export.py run=outputs/... format=huggingface`."""

from pathlib import Path

from attnbench.cli.launch import launch
from attnbench.cli.reading import read_export
from attnbench.settings.schema import ExportSettings, RunSettings


def main(wanted: tuple[ExportSettings, RunSettings]) -> Path:
    """Import the model only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.export.huggingface import export_run

    return export_run(*wanted)


if __name__ == "__main__":
    launch(main, "export", read=read_export)
