"""Sharing of runs by variants that are one model in an evaluation."""

from collections.abc import Mapping

from attnbench.comparison.variants import Variant
from attnbench.results.identity import config_hash
from attnbench.results.rows import TRAINING
from attnbench.settings.errors import UserError

Shared = dict[str, dict[str, str]]
"""By evaluation: variants whose runs are another's, and whose: {"recall": {"flash": "softmax"}}."""


def shared_jobs(variants: Mapping[str, Variant]) -> Shared:
    """List the variants that share the runs of an earlier one, by evaluation (TRAINING is one).

    Trained models are shared if they compute the same function, system evaluations only with the same kernel.
    """
    models, functions = {}, {}
    for name, variant in variants.items():
        models[name], functions[name] = _hashes(variant)
    names = list(variants)
    for index, name in enumerate(names):
        for other in names[:index]:
            if models[name] == models[other]:
                raise UserError(
                    f"plan.variants: {other} and {name} are one model in every evaluation of this plan; leave one "
                    "of them out, or name what tells them apart"
                )
    shared: Shared = {}
    for index, name in enumerate(names):
        for evaluation, hashed in functions[name].items():
            first = next((other for other in names[:index] if functions[other].get(evaluation) == hashed), None)
            if first is not None:
                shared.setdefault(evaluation, {})[name] = first
    return shared


def _hashes(variant: Variant) -> tuple[dict[str, str], dict[str, str]]:
    """Hash a variant's model and its function by evaluation, both with the grid of rates."""
    models, functions = {}, {}
    if variant.kinds.of_checkpoints:
        options = [[entry.name, entry.target, entry.options] for entry in variant.kinds.of_checkpoints]
        models[TRAINING] = config_hash([variant.run.config_hash, options])
        functions[TRAINING] = config_hash([variant.run.function_hash, options])
    for evaluation in variant.kinds.probes:
        scores = [score for score in variant.scores if score.evaluation == evaluation.name]
        jobs = [score.probe for score in scores if score.probe is not None]
        rates = list(scores[0].grid)
        models[evaluation.name] = config_hash([rates, [job.config_hash for job in jobs]])
        functions[evaluation.name] = config_hash([rates, [job.function_hash for job in jobs]])
    for job in variant.timed:
        models[job.evaluation] = functions[job.evaluation] = job.results.stem
    return models, functions
