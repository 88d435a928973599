"""Variants that are one model in an evaluation, or one function by another kernel: they share its cells there."""

from collections.abc import Mapping

from attnbench.comparison.cells import ByKind
from attnbench.evals.runners.prepare_probe import build_tasks, prepare_probe
from attnbench.evals.runners.system import prepare_system
from attnbench.results.identity import config_hash
from attnbench.results.rows import TRAINING
from attnbench.settings.errors import UserError
from attnbench.training.prepare import Run, function_hash

Shared = dict[str, dict[str, str]]
"""By evaluation: variants whose cells are another's, and whose: {"recall": {"flash": "softmax"}}."""


def shared_cells(variants: Mapping[str, tuple[Run, ByKind]]) -> Shared:
    """Variants that share the cells of another one, the first of them, by evaluation, TRAINING among these.

    In evaluations of what a mixer can do those are one whose model computes one function, in evaluations of the system
    those alone whose kernels are one too.

    Raises:
        UserError: two variants are one model by one kernel in every evaluation, and nothing would be compared.
    """
    models, functions = {}, {}
    for name, (prepared, kinds) in variants.items():
        models[name], functions[name] = _hashes(prepared, kinds)
    names = list(variants)
    for index, name in enumerate(names):
        for other in names[:index]:
            if models[name] == models[other]:
                raise UserError(
                    f"plan.variants: {other} and {name} are one model in every evaluation of this plan; leave one "
                    "of them out, or name what tells them apart"
                )
    found: Shared = {}
    for index, name in enumerate(names):
        for evaluation, hashed in functions[name].items():
            first = next((other for other in names[:index] if functions[other].get(evaluation) == hashed), None)
            if first is not None:
                found.setdefault(evaluation, {})[name] = first
    return found


def _hashes(prepared: Run, kinds: ByKind) -> tuple[dict[str, str], dict[str, str]]:
    """By evaluation, what a variant's model hashes to, and its function; the rates of its search are part of both."""
    models, functions = {}, {}
    if kinds.of_checkpoints:
        options = [[own.name, own.target, own.options] for own in kinds.of_checkpoints]
        models[TRAINING] = config_hash([prepared.config_hash, options])
        functions[TRAINING] = config_hash([function_hash(prepared), options])
    for evaluation in kinds.probes:
        probe, tasks = build_tasks(prepared.settings, evaluation)
        rates = probe.learning_rates
        runs = [prepare_probe(prepared.settings, evaluation, index, rates[0]) for index in range(len(tasks))]
        models[evaluation.name] = config_hash([rates, [own.config_hash for own in runs]])
        functions[evaluation.name] = config_hash([rates, [own.function_hash for own in runs]])
    for evaluation in kinds.system:
        models[evaluation.name] = functions[evaluation.name] = prepare_system(prepared, evaluation)[1].stem
    return models, functions
