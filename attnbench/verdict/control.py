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


def control_of(rows: Sequence[ResultRow], seeds: Collection[int]) -> tuple[list[ResultRow], list[ResultRow]]:
    others = [row for row in rows if row.identity.seed not in seeds]
    return others, [row for row in rows if row.identity.seed in seeds]


def judge_control(
    rows: Sequence[ResultRow], control: Sequence[ResultRow], *, reference: str, primaries: Mapping[str, Primary]
) -> list[Verdict]:
    """Compare the reference with itself under shifted seeds, as a separate family: it must be neither better nor
    worse.

    Rows of the reference may have the name of a variant whose runs it shares; evaluations without rows of the control
    are left out.
    """
    if not control:
        return []

    def again(row: ResultRow) -> ResultRow:
        return replace(row, identity=replace(row.identity, variant=CONTROL, seed=row.identity.seed - CONTROL_SHIFT))

    names = {row.identity.evaluation: row.identity.variant for row in control}
    same = [row for row in rows if row.identity.variant == names.get(row.identity.evaluation)]
    named = [replace(row, identity=replace(row.identity, variant=reference)) for row in same]
    over_seeds, pairs = figures([*named, *map(again, control)]), []
    for evaluation in primaries.keys() & names.keys():
        of_it = [figure for figure in over_seeds if figure.evaluation == evaluation]
        measured = primary_figures(of_it, primaries[evaluation], [reference, CONTROL])
        pairs.append(pair_of(evaluation, primaries[evaluation], CONTROL, reference, measured, of_it))
    return judge(sorted(pairs, key=lambda pair: list(primaries).index(pair.evaluation)))


def control_sentence(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    subject = f"Control: {verdicts[0].pair.second} against itself under other seeds"
    came_out = [f"{verdict.outcome} in {verdict.pair.evaluation}" for verdict in verdicts if verdict.winner is not None]
    if came_out:
        return f"{subject} came out {', '.join(came_out)}: this comparison finds differences that are none."
    obstacles = {verdict.pair.evaluation: _obstacle(verdict, SIGNIFICANCE / len(verdicts)) for verdict in verdicts}
    tested = [evaluation for evaluation, obstacle in obstacles.items() if not obstacle]
    others = [f"{evaluation} ({obstacle})" for evaluation, obstacle in obstacles.items() if obstacle]
    not_tested = f"could not be tested in {', '.join(others)}"
    if not tested:
        return f"{subject} {not_tested}."
    ending = f"; it {not_tested}" if others else ""
    return f"{subject} came out neither better nor worse in {', '.join(tested)}, as it must{ending}."


def _obstacle(verdict: Verdict, alpha: float) -> str:
    if verdict.outcome == "none":
        return verdict.reason
    if verdict.pair.failed:
        return "some of its seeds diverged"
    num_seeds = verdict.num_seeds
    return "" if verdict.pair.test.smallest_p(num_seeds) <= alpha else f"{num_seeds} seeds are too few"
