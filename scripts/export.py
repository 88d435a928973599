"""Write a run as a folder for another library: `python scripts/export.py run=outputs/... format=huggingface`."""

from attnbench.cli.commands import export

if __name__ == "__main__":
    export()
