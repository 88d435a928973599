"""Looks of plan.seeds=auto: after each look at the scores, only undecided pairs get more seeds."""

import logging

from attnbench.comparison.plan import Comparison
from attnbench.comparison.program import Driver
from attnbench.results.rows import TRAINING
from attnbench.settings.schema import LOOKS
from attnbench.verdict.control import control_of
from attnbench.verdict.ranking import next_look
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import verdicts_of

log = logging.getLogger(__name__)


def look_again(comparison: Comparison, driver: Driver) -> bool:
    """Raise the number of seeds of the variants of undecided pairs; tell if any was raised."""
    comparison.settle(driver.answers)
    rows, _ = control_of(comparison.scored_rows(), comparison.control_seeds())
    verdicts = verdicts_of(
        figures(rows, comparison.shared_by_evaluation()),
        rank=comparison.plan.ranked,
        reference=comparison.plan.reference,
        primaries=comparison.primaries(),
        in_looks=True,
    )
    searched = {score.evaluation for score in comparison.scores}
    is_raised = False
    for verdict in verdicts:
        wanted, pair = next_look(verdict), verdict.pair
        if wanted is None:
            continue
        # A language model gets more seeds on every corpus.
        evaluation = pair.evaluation if pair.evaluation in searched else TRAINING
        for key in ((evaluation, pair.first), (evaluation, pair.second)):
            if wanted > comparison.num_seeds.get(key, min(LOOKS)):
                comparison.num_seeds[key] = wanted
                is_raised = True
                names = f"{pair.first} and {pair.second}"
                log.info(f"{pair.evaluation}: {names} are undecided, {key[1]} gets {wanted} seeds")
    return is_raised
