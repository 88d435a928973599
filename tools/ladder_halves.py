"""How well eight seeds separate the variants of a ladder, and whether halves of the seeds agree, as a Markdown table.

python tools/ladder_halves.py outputs/ladder

Takes a comparison of outputs/, or a published folder of docs/results. docs/ladder.md explains the columns.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from attnbench.report.inputs import read_inputs
from attnbench.results.numbers import reaches
from attnbench.settings.errors import UserError
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict

SEPARATED = {"ladder_recall": 8, "ladder_copy": 8, "ladder_state": 5, "ladder_range": 5}
"""Fewest pairs of fifteen that each probe shall separate."""

AGREEMENT = 0.9
"""Least share of splits in which both halves of the seeds have the same sign, on average over separated pairs."""


def agreement(differences: Sequence[float]) -> float:
    """Return the share of splits into two halves whose mean differences have the same sign; 0 has none.

    Raises:
        UserError: an odd number of seeds.
    """
    first, *others = differences
    if len(others) % 2 == 0:
        raise UserError(f"{len(differences)} seeds: only an even number of seeds has two halves")
    total = sum(differences)
    # Each split once: the first seed is always in the first half.
    halves = [first + sum(chosen) for chosen in combinations(others, len(differences) // 2 - 1)]
    return fmean(half * (total - half) > 0 for half in halves)


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a row for each probe, and a row for each pair that its verdict separates."""
    by_probe = grouped(verdicts, lambda verdict: verdict.pair.evaluation)
    probes = {name: group for name, group in by_probe.items() if name in SEPARATED}
    if not probes:
        raise UserError(f"no verdicts on {', '.join(SEPARATED)}: give a comparison that tests a ladder")
    return "\n".join([*_probes(probes), "", *_pairs(probes)])


def _separated(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.outcome in ("better", "worse")]


def _probes(probes: dict[str, list[Verdict]]) -> Iterator[str]:
    yield f"| probe | pairs | separated | goal | same sign in both halves | goal of {AGREEMENT:.0%} |"
    yield "| --- | --: | --: | --- | --: | --- |"
    for name, verdicts in probes.items():
        separated, goal = _separated(verdicts), SEPARATED[name]
        shares = [agreement(verdict.pair.differences) for verdict in separated]
        same, held = (f"{fmean(shares):.1%}", _met(reaches(fmean(shares), AGREEMENT))) if shares else ("–", "–")
        enough = f"{goal} of 15: {_met(len(separated) >= goal)}" if len(verdicts) == 15 else "for 15 pairs alone"
        yield f"| {name} | {len(verdicts)} | {len(separated)} | {enough} | {same} | {held} |"


def _pairs(probes: dict[str, list[Verdict]]) -> Iterator[str]:
    yield "| probe | better | worse | doublings | seeds | same sign in both halves |"
    yield "| --- | --- | --- | --: | --: | --: |"
    for name, verdicts in probes.items():
        for verdict in _separated(verdicts):
            pair, difference = verdict.pair, verdict.difference
            assert difference is not None
            better, worse = (pair.first, pair.second)[:: 1 if difference > 0 else -1]
            same = agreement(pair.differences)
            yield f"| {name} | {better} | {worse} | {abs(difference):.2f} | {verdict.num_seeds} | {same:.1%} |"


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/PLAN or a folder of docs/results")
    folder = parser.parse_args(words).folder
    try:
        print(table(read_inputs(folder).verdicts))
    except UserError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
