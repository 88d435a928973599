"""Publish results: `python scripts/publish.py docs/results/NAME-MACHINE outputs/PLAN --title ...`."""

import argparse
from pathlib import Path

from attnbench.bench.page import is_bench, write_page
from attnbench.comparison.findings import FINDINGS
from attnbench.comparison.publish import publish_comparison, publish_findings, publish_runs
from attnbench.machine.signals import ending_in_one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write, docs/results/<table>-<machine>")
    parser.add_argument(
        "runs", type=Path, nargs="+", help="folder of a comparison or of findings, runs of one bench, or runs"
    )
    parser.add_argument("--title", required=True)
    parser.add_argument("--command", help="what made the runs, a line each; the others know it")
    parser.add_argument("--note", default="", help="what a reader must know besides")
    given = parser.parse_args()
    with ending_in_one_line():
        if is_bench(given.runs[0]):
            write_page(given.runs, given.target, title=given.title, note=given.note)
        elif (given.runs[0] / FINDINGS).exists():
            publish_findings(given.runs[0], given.target, title=given.title, note=given.note)
        elif given.command is None:
            publish_comparison(given.runs[0], given.target, title=given.title, note=given.note)
        else:
            publish_runs(given.runs, given.target, title=given.title, command=given.command, note=given.note)


if __name__ == "__main__":
    main()
