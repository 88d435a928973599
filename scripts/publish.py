"""Publishes a table of finished runs: `python scripts/publish.py docs/results/NAME-MACHINE outputs/default/*`."""

import argparse
import sys
from pathlib import Path

from attnbench.errors import UserError
from attnbench.publish import publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write, docs/results/<table>-<machine>")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs, in the order of the table")
    parser.add_argument("--title", required=True)
    parser.add_argument("--command", required=True, help="what made the runs")
    given = parser.parse_args()
    try:
        publish(given.runs, given.target, title=given.title, command=given.command)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
