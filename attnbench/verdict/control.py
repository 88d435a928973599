"""Control of a comparison: its reference again under other seeds, which must come out neither better nor worse."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from attnbench.results.metrics import Primary
from attnbench.results.protocol import SIGNIFICANCE
from attnbench.results.rows import ResultRow
from attnbench.settings.schema import CONTROL_SHIFT
from attnbench.verdict.family import pair_of, primary_figures
from attnbench.verdict.ranking import Verdict, judge
from attnbench.verdict.seeds import figures

CONTROL = "control"
"""Name that the rows of the control are judged under."""


def control_of(rows: Sequence[ResultRow], seeds: Collection[int]) -> tuple[list[ResultRow], list[ResultRow]]:
    """Part the rows of a comparison from those of its control, whose seeds are `seeds`."""
    others = [row for row in rows if row.identity.seed not in seeds]
    return others, [row for row in rows if row.identity.seed in seeds]


def judge_control(
    rows: Sequence[ResultRow], control: Sequence[ResultRow], *, reference: str, primaries: Mapping[str, Primary]
) -> list[Verdict]:
    """Compare a reference with itself under shifted seeds, in the order of the seeds, as a family of its own.

    Args:
        rows, control: as `control_of` parts them.
        reference: by whose name these are known, in evaluations where it shares the cells of another by that one's.
        primaries: primary metric by evaluation; those that the control has no rows of are left out.
    """
    if not control:
        return []
    again = [_again(row) for row in control]
    names = {row.identity.evaluation: row.identity.variant for row in control}
    same = [row for row in rows if row.identity.variant == names.get(row.identity.evaluation)]
    named = [replace(row, identity=replace(row.identity, variant=reference)) for row in same]
    over_seeds, pairs = figures([*named, *again]), []
    for evaluation in primaries.keys() & names.keys():
        of_it = [figure for figure in over_seeds if figure.evaluation == evaluation]
        measured = primary_figures(of_it, primaries[evaluation], [reference, CONTROL])
        pairs.append(pair_of(evaluation, primaries[evaluation], CONTROL, reference, measured, of_it))
    return judge(sorted(pairs, key=lambda pair: list(primaries).index(pair.evaluation)))


def control_sentence(verdicts: Sequence[Verdict]) -> str:
    """Write what came out of the control; empty where there was none."""
    if not verdicts:
        return ""
    what = f"Control: {verdicts[0].pair.second} against itself under other seeds"
    came_out = [f"{verdict.outcome} in {verdict.pair.evaluation}" for verdict in verdicts if verdict.winner is not None]
    if came_out:
        return f"{what} came out {', '.join(came_out)}: this comparison finds differences that are none."
    obstacles = {verdict.pair.evaluation: _obstacle(verdict, SIGNIFICANCE / len(verdicts)) for verdict in verdicts}
    tested = [evaluation for evaluation, obstacle in obstacles.items() if not obstacle]
    others = [f"{evaluation} ({obstacle})" for evaluation, obstacle in obstacles.items() if obstacle]
    not_tested = f"could not be tested in {', '.join(others)}"
    if not tested:
        return f"{what} {not_tested}."
    ending = f"; it {not_tested}" if others else ""
    return f"{what} came out neither better nor worse in {', '.join(tested)}, as it must{ending}."


def _obstacle(verdict: Verdict, alpha: float) -> str:
    """Tell why a control could not have come out better or worse at the first Holm step; empty where it could."""
    if verdict.outcome == "none":
        return verdict.reason
    if verdict.pair.failed:
        return "some of its seeds diverged"
    num_seeds = verdict.num_seeds
    return "" if verdict.pair.test.smallest_p(num_seeds) <= alpha else f"{num_seeds} seeds are too few"


def _again(row: ResultRow) -> ResultRow:
    seed = row.identity.seed
    assert isinstance(seed, int)
    return replace(row, identity=replace(row.identity, variant=CONTROL, seed=seed - CONTROL_SHIFT))
