"""Make the report of an experiment: `python scripts/report.py outputs/<experiment>`."""

import argparse
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line
from attnbench.report.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment of outputs/, a run, or a folder with a results.csv")
    parser.add_argument("--output", type=Path, help="folder to write; FOLDER/report if not given")
    given = parser.parse_args()
    with ending_in_one_line():
        print(write_report(given.folder, target=given.output))


if __name__ == "__main__":
    main()
