"""Publish results: `python scripts/publish.py docs/results/NAME-MACHINE outputs/PLAN --title ...`."""

import argparse
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line
from attnbench.settings.errors import UserError


@ending_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write, docs/results/<table>-<machine>")
    parser.add_argument(
        "runs", type=Path, nargs="+", help="folder of a comparison or of findings, or runs of one bench"
    )
    parser.add_argument("--title", required=True)
    parser.add_argument("--note", default="", help="what a reader must know besides")
    given = parser.parse_args()
    # Imported here: torch takes seconds to load, and a Ctrl-C meanwhile is one line too.
    from attnbench.bench.page import is_bench, write_page
    from attnbench.cli.reading_names import every_finding
    from attnbench.comparison.findings import DECISIONS
    from attnbench.comparison.publish import publish_comparison, publish_findings
    from attnbench.results.page import check_target

    check_target(given.target, given.runs)
    first, about = given.runs[0], {"title": given.title, "note": given.note}
    if is_bench(first):
        write_page(given.runs, given.target, **about)
    elif (first / DECISIONS).exists():
        _refuse_others(given, "findings")
        publish_findings(first, given.target, every_finding(), **about)
    elif (first / "comparison.json").exists():
        _refuse_others(given, "a comparison")
        publish_comparison(first, given.target, **about)
    else:
        raise UserError(f"{first}: neither a comparison, findings nor a run of a bench; no other run has a page")


def _refuse_others(given: argparse.Namespace, what: str) -> None:
    if len(given.runs) > 1:
        raise UserError(f"{given.runs[1]}: {given.runs[0]} is {what}, which has a page alone; publish one at a time")


if __name__ == "__main__":
    main()
