"""Check the results files under outputs/: `python tools/check_results.py outputs [--remove]`.

Versions before December 2026 wrote results in place, so that a command that was cut off left a file without its last
record. attnbench takes a file that exists for complete. Such a file is listed here, and with --remove removed: the
command that made it makes it again. Altered files are listed too, and stay.
"""

import argparse
from pathlib import Path

from attnbench.results.files import read_json_lines
from attnbench.results.row_files import parse_results
from attnbench.settings.errors import UserError


def is_cut_off(path: Path) -> bool:
    """Tell if a results file ends before its last record.

    Raises:
        UserError: a line of it was altered.
    """
    lines = read_json_lines(path)
    return not any("complete" in content for content in lines.objects)


def check(outputs: Path, *, remove: bool) -> int:
    """Print the files that are cut off or altered; return their number."""
    number = 0
    for path in sorted(outputs.rglob("results/*.jsonl")):
        try:
            if is_cut_off(path):
                print(f"{path}: cut off{', removed' if remove else ''}")
                number += 1
                if remove:
                    path.unlink()
                continue
            parse_results(path)
        except UserError as error:
            print(error)
            number += 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--remove", action="store_true", help="remove files that are cut off")
    given = parser.parse_args()
    number = check(given.outputs, remove=given.remove)
    raise SystemExit(f"{number} files" if number and not given.remove else 0)


if __name__ == "__main__":
    main()
