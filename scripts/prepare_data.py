"""Bring WikiText-2 into data/ as parquet: from the Hugging Face Hub, or from a folder that already has it."""

import argparse
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line


@ending_in_one_line()
def main() -> None:
    # Imported here: what it needs takes seconds to load, and a Ctrl-C meanwhile is one line too.
    from attnbench.data.wikitext import FOLDERS, prepare

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--version",
        choices=sorted(FOLDERS),
        default="raw",
        help="raw keeps every character; in v1 rare words are <unk>",
    )
    parser.add_argument("--source", type=Path, help="a folder with the three parquet files; default: download them")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="the project, whose data/ is filled"
    )
    options = parser.parse_args()
    folder = prepare(options.version, options.source, options.root)
    print(f"{folder}: WikiText-2 {options.version}, complete and as published")


if __name__ == "__main__":
    main()
