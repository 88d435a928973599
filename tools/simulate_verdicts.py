"""Error, power and coverage of the verdicts by simulation, as a Markdown table: `python tools/simulate_verdicts.py`.

Scores are simulated, verdicts are those of attnbench/verdict: a number here is a property of the rules alone.
"""

import argparse
import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from scipy.stats import binom

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.evals.base import CheckpointEvaluation, Evaluation
from attnbench.model.building import function_of
from attnbench.results.metrics import Primary
from attnbench.results.protocol import SIGNIFICANCE
from attnbench.settings.hybrid import layers_of
from attnbench.settings.registry import resolve
from attnbench.settings.schema import LOOKS, PlanSettings
from attnbench.verdict.family import TESTS, Pair
from attnbench.verdict.ranking import holm, judge, judge_in_looks
from attnbench.verdict.statistics import (
    Interval,
    bounded_interval,
    share_interval,
    student_interval,
)

NATS = Primary(metric="nats_per_character", kind="nats", margin=float(np.log(1.01)))
ACCURACY = Primary(metric="accuracy", kind="accuracy", margin=0.01)

SPREADS = {"nats": 0.0073, "accuracy": 0.01}
"""Standard deviation of paired differences, by kind."""

FAILURE = 0.9
"""Difference of accuracies at a seed that one of two variants alone solves."""

Family = list[tuple[Primary, int, int]]
"""Primary metric, number of pairs with the reference (of variants, where all pairs are compared), and seeds of each."""

LATER_FAMILIES = {
    "1 variant and a reference, 1 metric, 10 seeds": [(NATS, 1, 10)],
    "all pairs of 3 variants, 1 metric, 3 seeds": [(NATS, 3, 3)],
}
"""Families of plans that are not in conf/ yet."""


def plans() -> dict[str, Family]:
    """Read the families of all plans of conf/plan that test something: "compare, 10 seeds, ..."; equal ones once."""
    families: dict[str, Family] = {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for path in sorted((CONF / "plan").glob("*.yaml"), key=lambda path: (path.stem != "compare", path.stem)):
            config = compose_hydra("compare", [f"plan={path.stem}"], return_hydra_config=True)
            plan = read_comparison(config, config.hydra).plan
            members = _family_of(plan) if plan.ranked else []
            if members and members not in families.values():
                families[_title(plan.reference, members, path.stem)] = members
    return families


def _family_of(plan: PlanSettings) -> Family:
    """Count pairs and seeds of each primary metric; variants that are one function are one."""
    evaluations = f"eval=[{','.join(plan.evaluations)}]"
    runs = [compose([evaluations, "device=cpu", *plan.overrides, *words]) for words in plan.variants.values()]
    layers = [layers_of(run.mixer, run.model.num_layers) for run in runs]
    functions = {json.dumps([function_of(mixer) for mixer in mixers], sort_keys=True) for mixers in layers}
    members: Family = []
    for entry in runs[0].evaluations:
        cls = resolve(entry.target, Evaluation)
        # tools/simulate_ladder.py has the levels of ladders.
        has_figures = cls.primary is not None and cls.primary.kind in SPREADS
        if has_figures and entry.name in (plan.tested or plan.evaluations):
            seeds = plan.seeds if issubclass(cls, CheckpointEvaluation) else plan.probe_seeds
            primary = NATS if cls.primary.kind == "nats" else ACCURACY
            assert primary.kind == cls.primary.kind
            assert math.isclose(primary.margin, cls.primary.margin)
            members.append((primary, len(functions) - (plan.reference is not None), len(seeds)))
    # One seed has no test: what the plan has with five.
    return [(primary, number, num if num > 1 else 5) for primary, number, num in members]


def _title(reference: str | None, members: Family, name: str) -> str:
    number, seeds = members[0][1], ", ".join(sorted({str(num) for *_, num in members}))
    who = f"{number} variants and a reference" if reference is not None else f"all pairs of {number} variants"
    return f"{who}, {len(members)} metric{'s' if len(members) > 1 else ''}, {seeds} seeds, as plan={name}"


def about_normal(rng: np.random.Generator, num_variants: int, num_seeds: int) -> np.ndarray:
    """Draw accuracies about 0.8."""
    return np.clip(rng.normal(0.8, 0.05, (num_variants, num_seeds)), 0, 1)


def two_peaked(rng: np.random.Generator, num_variants: int, num_seeds: int) -> np.ndarray:
    """Draw accuracies of runs that solve their task with a probability of 0.8."""
    shape = (num_variants, num_seeds)
    return np.where(rng.random(shape) < 0.8, rng.uniform(0.97, 1, shape), rng.uniform(0.02, 0.06, shape))


def nats(rng: np.random.Generator, num_variants: int, num_seeds: int) -> np.ndarray:
    """Draw nats about 1 whose paired differences have the spread of character models."""
    return rng.normal(1, SPREADS["nats"] / np.sqrt(2), (num_variants, num_seeds))


def pairs_with_reference(primary: Primary, scores: np.ndarray) -> list[Pair]:
    """Make the pairs of the first row of `scores`, the reference, with every other."""
    return [_pair(primary, row - scores[0]) for row in scores[1:]]


def all_pairs(primary: Primary, scores: np.ndarray) -> list[Pair]:
    """Make the pairs of all rows of `scores`."""
    return [_pair(primary, first - second) for first, second in combinations(scores, 2)]


def found(pairs: Sequence[Pair]) -> list[bool]:
    """Tell which pairs come out better or worse."""
    p_values = [pair.test.p_value(pair.differences, resolution=pair.resolution) for pair in pairs]
    return holm(p_values).rejected


def equivalent(pairs: Sequence[Pair]) -> list[bool]:
    """Tell which pairs come out equivalent."""
    p_values = [
        pair.test.equivalence_p_value(pair.differences, pair.primary.margin, resolution=pair.resolution)
        for pair in pairs
    ]
    return holm(p_values).rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulated probability beside what is asked of it."""

    title: str
    share: float
    low: float = 0.0
    high: float = 1.0
    num_draws: int | None = None
    """None: computed exactly."""

    @property
    def holds(self) -> bool:
        """True within two standard errors of the simulation."""
        return self.low - self._error(self.low) <= self.share <= self.high + self._error(self.high)

    def _error(self, bound: float) -> float:
        return 2 * math.sqrt(bound * (1 - bound) / self.num_draws) if self.num_draws else 1e-9


def simulate(num_draws: int) -> Iterator[Result]:
    """Run every simulation; a family of a plan is drawn `num_draws` times."""
    # statsmodels collects garbage at every adjustment, which is slow among the objects of all that is imported: the
    # first imports the rest.
    holm([1.0])
    gc.freeze()
    yield from false_verdicts(num_draws)
    yield false_verdicts_in_looks(num_draws)
    # With intervals, which take longer than their tests.
    yield from false_margins(min(num_draws, 2_000))
    yield power(num_draws)
    yield from detected(num_draws)
    yield from false_equivalence(min(num_draws, 2_000))
    yield from failing_seeds(min(num_draws, 2_000))
    yield from equivalence(num_draws)
    yield from coverage(num_draws)


def false_verdicts(num_draws: int) -> Iterator[Result]:
    """Share of families in which equal variants come out better or worse, for scores of every shape."""
    for name, members in {**plans(), **LATER_FAMILIES}.items():
        kinds = {primary.kind for primary, *_ in members}
        for shape in ("about normal", "two-peaked") if "accuracy" in kinds else ("",):
            rng = np.random.default_rng(0)
            accuracies = two_peaked if shape == "two-peaked" else about_normal
            wrong, num_pairs = 0, 0
            for _ in range(num_draws):
                pairs = []
                for primary, num_variants, num_seeds in members:
                    draw = nats if primary is NATS else accuracies
                    if name.startswith("all pairs"):
                        pairs += all_pairs(primary, draw(rng, num_variants, num_seeds))
                    else:
                        pairs += pairs_with_reference(primary, draw(rng, num_variants + 1, num_seeds))
                num_pairs = len(pairs)
                wrong += any(found(pairs))
            words = f"equal variants come out better or worse, {num_pairs} pairs: {name}"
            title = f"{words}, accuracies {shape}" if shape else words
            yield Result(title=title, share=wrong / num_draws, high=SIGNIFICANCE, num_draws=num_draws)


def false_verdicts_in_looks(num_draws: int) -> Result:
    """Share of families of nine in which a look of plan.seeds=auto finds equal variants better or worse."""
    rng, wrong, most = np.random.default_rng(5), 0, max(LOOKS)
    for _ in range(num_draws):
        pairs = [pair for _ in range(3) for pair in pairs_with_reference(NATS, nats(rng, 4, most))]
        wrong += any(verdict.winner is not None for verdict in judge_in_looks(pairs))
    title = f"equal variants come out better or worse in any look of plan.seeds=auto, {len(pairs)} pairs, nats"
    return Result(title=title, share=wrong / num_draws, high=SIGNIFICANCE, num_draws=num_draws)


def false_margins(num_draws: int) -> Iterator[Result]:
    """Share of families of nine in which a difference of exactly the margin comes out as more than matters.

    The interval of a pair is at its Holm level, which is no test of the margin over the family: where all pairs differ,
    the levels' sum is significance times 1 + 1/2 + ... + 1/9, and one end of each interval has half of it.
    """
    most = SIGNIFICANCE / 2 * sum(1 / rank for rank in range(1, 10))
    for shape, spreads in {"equal": np.full(9, 1e-3), "unequal": np.geomspace(1e-5, 1e-3, 9)}.items():
        rng, wrong = np.random.default_rng(6), 0
        for _ in range(num_draws):
            pairs = [_pair(NATS, rng.normal(NATS.margin, spread, 10)) for spread in spreads]
            wrong += any(verdict.exceeds_margin for verdict in judge(pairs))
        title = f"differences of the margin come out as more than it in any of 9 pairs, 10 seeds, {shape} spreads"
        yield Result(title=title, share=wrong / num_draws, high=most, num_draws=num_draws)


def power(num_draws: int) -> Result:
    """Share of draws in which a difference of 1.5 % in perplexity is found, in the family of plan=compare."""
    rng = np.random.default_rng(1)
    means = {"nats": math.log(1.015), "accuracy": 0.0}
    share = np.mean([found(family_of_nine(rng, means, 10))[0] for _ in range(num_draws)])
    title = "1.5 % of perplexity comes out better or worse with 10 seeds, 9 pairs"
    return Result(title=title, share=float(share), low=0.8, num_draws=num_draws)


def detected(num_draws: int) -> Iterator[Result]:
    """Share of draws in which a normal difference as large as the noise floor names is found, at the first step."""
    for num_pairs, num_seeds in ((9, 10), (42, 12)):
        test, alpha, rng = TESTS["accuracy"], SIGNIFICANCE / num_pairs, np.random.default_rng(7)
        effect = test.detectable(1.0, alpha, num_seeds)
        draws = rng.normal(effect, 1.0, (num_draws, num_seeds))
        share = np.mean([test.p_value(draw.tolist(), resolution=0.0) <= alpha for draw in draws])
        title = f"the noise floor's difference of accuracies is found with {num_seeds} seeds, {num_pairs} pairs"
        # The floor itself is drawn.
        yield Result(title=title, share=float(share), low=0.78, num_draws=num_draws)


def false_equivalence(num_draws: int) -> Iterator[Result]:
    """Share of families in which variants that differ by the margin come out equivalent."""
    for primary in (NATS, ACCURACY):
        for num_pairs, num_seeds in ((9, 10), (42, 12)):
            rng, wrong = np.random.default_rng(8), 0
            for _ in range(num_draws):
                draws = rng.normal(primary.margin, SPREADS[primary.kind], (num_pairs, num_seeds))
                wrong += any(equivalent([_pair(primary, draw) for draw in draws]))
            title = f"differences of the margin come out equivalent in any of {num_pairs} pairs, {num_seeds} seeds"
            share = wrong / num_draws
            yield Result(title=f"{title}, {primary.kind}", share=share, high=SIGNIFICANCE, num_draws=num_draws)


def failing_seeds(num_draws: int) -> Iterator[Result]:
    """Share of verdicts and intervals that hold where every 12th or 20th seed of one variant of a pair fails.

    A sentence is about the seeds that solve the task where all that were seen do (`Pair.condition`): then it is held
    against the difference of such seeds, otherwise against that of all seeds. The rows without a bound read the same
    numbers as of all seeds, which the sentences do not say.
    """
    for every, (num_pairs, num_seeds) in ((12, (42, 12)), (20, (9, 10))):
        name = f"every {every}th seed of a variant fails, {num_seeds} seeds"
        rng, wrong = np.random.default_rng(9), 0
        for _ in range(num_draws):
            pairs = _with_failures(rng, ACCURACY.margin, every, (num_pairs, num_seeds))
            same = equivalent(pairs)
            wrong += any(it and pair.condition for it, pair in zip(same, pairs, strict=True))
        title = (
            f"{name}: differences of the margin come out equivalent of seeds that solve it, any of {num_pairs} pairs"
        )
        yield Result(title=title, share=wrong / num_draws, high=SIGNIFICANCE, num_draws=num_draws)
        pairs = _with_failures(rng, 0.0, every, (num_draws, num_seeds))
        share = sum(it.is_equivalent for pair in pairs for it in judge([pair])) / num_draws
        title = f"{name}: equal where solved, and equivalent if read as of all seeds, 1 pair"
        yield Result(title=title, share=share, num_draws=num_draws)
        of_all = FAILURE / every
        said, read = 0, 0
        for pair in pairs:
            low, high = pair.test.interval(pair.differences, 1 - SIGNIFICANCE, resolution=pair.resolution)
            read += low <= of_all <= high
            said += low <= (0.0 if pair.condition else of_all) <= high
        title = f"{name}: interval of a difference of accuracies, of the seeds that it is said to be of"
        yield Result(title=title, share=said / num_draws, low=0.93, num_draws=num_draws)
        title = f"{name}: interval of a difference of accuracies, read as of all seeds"
        yield Result(title=title, share=read / num_draws, num_draws=num_draws)


def _with_failures(rng: np.random.Generator, given: float, every: int, shape: tuple[int, int]) -> list[Pair]:
    """Draw pairs whose first variant solves its task and whose second fails with every so many-th seed.

    Args:
        given: mean difference of the seeds that both solve.
        shape: number of pairs and of seeds.
    """
    fails = rng.random(shape) < 1 / every
    differences = np.where(fails, FAILURE, rng.normal(given, SPREADS["accuracy"] / 4, shape))
    return [
        replace(_pair(ACCURACY, row), solved=(shape[1], shape[1] - int(failed.sum())))
        for row, failed in zip(differences, fails, strict=True)
    ]


def equivalence(num_draws: int) -> Iterator[Result]:
    """Share of equal pairs that come out equivalent with the number of seeds that a report names for their spread."""
    for index, primary in enumerate((NATS, ACCURACY)):
        num_pairs = 9
        needed = TESTS[primary.kind].seeds_needed(
            *(0.0, SPREADS[primary.kind], primary.margin),
            alpha=SIGNIFICANCE / num_pairs,
            equivalence_alpha=SIGNIFICANCE / num_pairs,
        )
        assert needed is not None
        assert 5 <= needed <= 20, needed
        rng = np.random.default_rng(2)
        means = {"nats": 0.0, "accuracy": 0.0}
        share = np.mean([equivalent(family_of_nine(rng, means, needed))[3 * index] for _ in range(num_draws)])
        title = f"equal variants come out equivalent in {primary.kind} with the {needed} seeds that are named, 9 pairs"
        yield Result(title=title, share=float(share), low=0.8, num_draws=num_draws)


def coverage(num_draws: int) -> Iterator[Result]:
    """Share of 95 % intervals that hold the true mean."""
    for num_seeds in (5, 10):
        ends = np.array([share_interval(count, num_seeds) for count in range(num_seeds + 1)])
        shares = np.linspace(0.001, 0.999, 999)
        inside = (ends[:, :1] <= shares) & (shares <= ends[:, 1:])
        mass = binom.pmf(np.arange(num_seeds + 1)[:, None], num_seeds, shares)
        title = f"interval of a share, {num_seeds} seeds, at the worst true share"
        yield Result(title=title, share=float((mass * inside).sum(0).min()), low=0.95)
        for shape, draw in {"about normal": about_normal, "two-peaked": two_peaked}.items():
            rng = np.random.default_rng(3)
            mean = float(draw(rng, 1, 1_000_000).mean())
            intervals = [bounded_interval(draw(rng, 1, num_seeds)[0]) for _ in range(num_draws)]
            title = f"interval of a mean accuracy, {num_seeds} seeds, {shape}"
            yield Result(title=title, share=_covered(intervals, mean), low=0.93, num_draws=num_draws)
        rng = np.random.default_rng(4)
        intervals = [student_interval(nats(rng, 1, num_seeds)[0]) for _ in range(num_draws)]
        title = f"interval of nats, {num_seeds} seeds"
        yield Result(title=title, share=_covered(intervals, 1.0), low=0.93, high=0.97, num_draws=num_draws)


def _covered(intervals: Sequence[Interval], mean: float) -> float:
    ends = [(interval.low, interval.high) for interval in intervals if interval.low is not None is not interval.high]
    assert all(low < high for low, high in ends), "an interval of no width"
    return sum(low <= mean <= high for low, high in ends) / len(intervals)


def family_of_nine(rng: np.random.Generator, means: dict[str, float], num_seeds: int) -> list[Pair]:
    """Draw nine pairs, three for each of three metrics: differences about these means."""
    return [
        _pair(primary, rng.normal(means[primary.kind], SPREADS[primary.kind], num_seeds))
        for primary in [NATS] * 3 + [ACCURACY] * 6
    ]


def _pair(primary: Primary, differences: np.ndarray) -> Pair:
    return Pair(
        evaluation=primary.metric,
        primary=primary,
        settings={},
        first="variant",
        second="reference",
        seeds=tuple(range(len(differences))),
        differences=tuple(differences.tolist()),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10_000)
    draws = parser.parse_args().draws
    print("| simulated | asked | reached |\n| --- | --: | --: |")
    for result in simulate(draws):
        asked = f">= {result.low:.0%}" if result.high == 1 else f"<= {result.high:.0%}"
        asked = f"{result.low:.0%} to {result.high:.0%}" if result.low > 0 and result.high < 1 else asked
        asked = "–" if result.low == 0 and result.high == 1 else asked
        print(
            f"| {result.title} | {asked} | {result.share:.1%}{'' if result.holds else ' (not reached)'} |", flush=True
        )


if __name__ == "__main__":
    main()
