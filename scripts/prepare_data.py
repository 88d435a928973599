"""Bring WikiText-2 into data/ as parquet: from the Hugging Face Hub, or from a folder that already has it."""

from attnbench.cli.commands import data

if __name__ == "__main__":
    data()
