"""Bring WikiText-2 or the corpus books into data/ as parquet: from the network, or from a folder that has it."""

from attnbench.cli.commands import data

if __name__ == "__main__":
    data()
