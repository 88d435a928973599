"""Time operators and print their table: `python scripts/benchmark.py bench=attention`; see --help."""

from attnbench.cli.commands import bench

if __name__ == "__main__":
    bench()
