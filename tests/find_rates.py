"""Rates of a finding's variants by compare.py's search.

    python tests/find_rates.py conv_recall recall=3e-3,1e-2,3e-2 --device cpu

Trains on seeds from 1,000,000 alone and scores nothing. Prints each variant's score at each rate, and the chosen one,
which goes into the finding's yaml before it is frozen.
"""

import argparse
from dataclasses import replace

from simulate_findings import findings

from attnbench.cli.compose import compose
from attnbench.comparison.cells import execute
from attnbench.comparison.findings import plan_of
from attnbench.comparison.plan import Comparison
from attnbench.comparison.search import rounds
from attnbench.results.rows import TRAINING
from attnbench.settings.finding import FindingsSettings


def main() -> None:
    """Search, variant by variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[finding.name for finding in findings()])
    parser.add_argument("rates", nargs="+", help="recall=1e-3,1e-2; of the language models training=2e-3,4e-3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--outputs", default="outputs/rates")
    given = parser.parse_args()
    [finding] = [finding for finding in findings() if finding.name == given.name]
    settings = FindingsSettings(
        names=None, full=False, freeze=False, seeds=[0], device=given.device, outputs_dir=given.outputs, report=False,
        rerun=False, command="",
    )  # fmt: skip
    # A finding names one rate, the last word of each variant; here a grid stands in its place.
    plan = plan_of(settings, finding)
    grids = dict(word.split("=") for word in given.rates)
    of_training = grids.pop(TRAINING, None)
    words = [f"eval.{name}.learning_rates=[{grid}]" for name, grid in grids.items()]
    plan.plan = replace(
        plan.plan,
        variants={name: [*variant.words, *words] for name, variant in finding.variants.items()},
        learning_rates=[float(rate) for rate in of_training.split(",")] if of_training else None,
        num_search_seeds=given.seeds,
    )
    comparison = Comparison(plan, compose)
    for search in comparison.all_searches():
        for cells in rounds(search.cells):
            for cell in cells:
                if not cell.is_done():
                    execute(cell)
        choice = search.choice()
        print(f"{search.name}: {choice.chosen:g} of {choice.seeds}, solved {choice.solved}", flush=True)


if __name__ == "__main__":
    main()
