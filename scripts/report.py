"""Make the report of an experiment, `python scripts/report.py outputs/<experiment>`, or compare two of them."""

import argparse
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line


@ending_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="an experiment of outputs/, a run, or a published folder")
    parser.add_argument(
        "other",
        nargs="?",
        help="another, whose variants are compared with those of the first, seed by seed; either of the two may be "
        "FOLDER@COMMIT or FOLDER@DATE, for the rows of one commit or of one day (2026-11-24)",
    )
    parser.add_argument("--output", type=Path, help="folder to write; FOLDER/report if not given")
    given = parser.parse_args()
    # Imported here: torch takes seconds to load, and a Ctrl-C meanwhile is one line too.
    from attnbench.report.page import write_report
    from attnbench.report.versus import write_versus

    if given.other is None:
        print(write_report(Path(given.folder), target=given.output))
    else:
        print(write_versus(given.folder, given.other, target=given.output))


if __name__ == "__main__":
    main()
