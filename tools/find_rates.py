"""Rates of findings' variants by compare.py's search, as lines for their yamls.

    python tools/find_rates.py gate_kda s3 --devices all --workers 4 --stack auto
    python tools/find_rates.py conv_recall --rates recall=3e-3,1e-2,3e-2 --device cpu

Trains on seeds from 1,000,000 alone and scores nothing. The chosen rates go into the yaml of the finding before it is
frozen. What is done is not trained again, so a search that was cut off goes on.
"""

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from omegaconf import OmegaConf
from simulate_findings import findings

from attnbench.cli.compose import CONF, compose
from attnbench.comparison.compare import run_plan
from attnbench.comparison.findings import plan_of
from attnbench.comparison.plan import Comparison
from attnbench.results.folder import holding
from attnbench.results.rows import TRAINING
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.finding import FindingSettings, FindingsSettings
from attnbench.settings.schema import ComparisonSettings
from attnbench.verdict.rates import Choice

TRAINING_RATES: list[float] = list(OmegaConf.load(CONF / "plan" / "compare.yaml").learning_rates)
"""Grid of language models, that of plan=compare; a probe's stands in the probe's yaml."""


def main() -> None:
    """Search, finding by finding."""
    names = [finding.name for finding in findings()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--rates", nargs="+", type=grid, default=[], help="other grids: recall=1e-3,1e-2, training=2e-3,4e-3"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", default="one", choices=("one", "all"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stack", default="1", help="a number, or auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outputs", default="outputs/rates")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    settings = FindingsSettings(
        names=None, full=False, freeze=False, seeds=[], device=given.device, outputs_dir=given.outputs,
        num_workers=given.workers, devices=given.devices, stack=None if given.stack == "auto" else int(given.stack),
        report=False, rerun=False, command="",
    )  # fmt: skip
    try:
        for finding in findings():
            if finding.name in given.names:
                search(finding, searching(finding, settings, dict(given.rates), num_seeds=given.seeds))
    except (Interrupted, UserError) as reason:
        print(reason, file=sys.stderr)
        sys.exit(reason.exit_code if isinstance(reason, Interrupted) else 2)


def grid(word: str) -> tuple[str, list[float]]:
    """Read recall=1e-3,1e-2."""
    name, _, rates = word.partition("=")
    return name, [float(rate) for rate in rates.split(",")]


def searching(
    finding: FindingSettings, settings: FindingsSettings, grids: dict[str, list[float]], *, num_seeds: int
) -> ComparisonSettings:
    """Return the finding's plan with grids in the place of the rates that its yaml names, the last words of each
    variant, and with no seed to score."""
    plan = plan_of(settings, finding)
    of_probes = {name: grid for name, grid in grids.items() if name != TRAINING}
    words = [f"eval.{name}.learning_rates={grid}" for name, grid in of_probes.items() if name in finding.evaluations]
    plan.plan = replace(
        plan.plan,
        variants={name: [*variant.words, *words] for name, variant in finding.variants.items()},
        learning_rates=grids.get(TRAINING, TRAINING_RATES),
        num_search_seeds=num_seeds,
        seeds=[],
        probe_seeds=[],
    )
    return plan


def search(finding: FindingSettings, plan: ComparisonSettings) -> None:
    """Carry out the searches of a finding, and print what each came to and the rates for its yaml."""
    comparison = Comparison(plan, compose)
    with holding(comparison.folder, waits=False):
        run_plan(comparison, is_frozen=False)
    choices: dict[tuple[str, str], list[Choice]] = defaultdict(list)
    for it, choice in zip(comparison.scores, comparison.choices, strict=True):
        choices[it.variant, it.evaluation].append(choice)
        print(f"{it.name}: {choice.chosen:g} of {choice.seeds}, solved {choice.solved}", flush=True)
    rates: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (variant, evaluation), group in choices.items():
        rates[variant][evaluation] = [best_of_all(group)]
    for variant, chosen in rates.items():
        print(f"{finding.name}: {variant}: rates: {chosen}", flush=True)


def best_of_all(choices: Sequence[Choice]) -> float:
    """Return the one rate of a variant for all settings of a probe, by the rule that chooses for one: most seeds
    solved, then fewest steps to 0.95, then the highest mean accuracy. A rate that widened the grid of some is left out.
    """
    if len(choices) == 1:
        return choices[0].chosen
    shared = set.intersection(*(set(choice.solved) for choice in choices))

    def key(rate: str) -> tuple[float, ...]:
        solved = sum(choice.solved[rate] for choice in choices)
        accuracy = fmean(choice.scores[rate] or 0.0 for choice in choices)
        return -solved, fmean(choice.steps[rate] for choice in choices), -accuracy, float(rate)

    return float(min(shared, key=key))


if __name__ == "__main__":
    main()
