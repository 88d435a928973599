"""Measure operators and print their table: `python scripts/benchmark.py bench=attention`; see --help."""

from collections.abc import Mapping
from pathlib import Path

from attnbench.cli.compose import compose_mixers
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_bench
from attnbench.settings.schema import BenchSettings


def main(settings: BenchSettings) -> Path:
    """Import the benches only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.bench.run import run_bench

    return run_bench(settings, compose_mixers)


def summarise(folders: Mapping[Path, object]) -> None:
    """Print one set of tables for all jobs of a bench."""
    from attnbench.bench.page import print_tables

    print_tables(list(folders))


if __name__ == "__main__":
    launch(main, "benchmark", summarise, read_bench)
