"""Variants of a plan, resolved on every corpus and divided into scores and timed jobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from attnbench.comparison.search import Score, score_of_training, scores_of_probe
from attnbench.evals.base import CheckpointEvaluation, Evaluation, Probe, SystemEvaluation
from attnbench.evals.runners.system import SystemJob
from attnbench.mixers.causality import check_causality
from attnbench.model.building import build_model
from attnbench.settings.check import setting_of
from attnbench.settings.errors import UserError, line_beside, one_line
from attnbench.settings.registry import MODULE, build, class_named, is_own, resolve
from attnbench.settings.schema import ComparisonSettings, EvaluationSettings, PlanSettings, RunSettings
from attnbench.training.job import Run
from attnbench.training.prepare import prepare

Compose = Callable[[Sequence[str]], RunSettings]
"""From the words of an attnbench train command line to its settings."""


class ByKind(NamedTuple):
    of_checkpoints: list[EvaluationSettings]
    probes: list[EvaluationSettings]
    system: list[EvaluationSettings]


def by_kind(settings: RunSettings) -> ByKind:
    groups: dict[type, list[EvaluationSettings]] = {CheckpointEvaluation: [], Probe: [], SystemEvaluation: []}
    for evaluation in settings.evaluations:
        cls = resolve(evaluation.target, Evaluation)
        kind = next((kind for kind in groups if issubclass(cls, kind)), None)
        if kind is None:
            names = ", ".join(kind.__name__ for kind in groups)
            raise UserError(f"eval.{evaluation.name}: {cls.__name__} must be one of {names}, not an Evaluation alone")
        groups[kind].append(evaluation)
    return ByKind(*groups.values())


class Variant(NamedTuple):
    """A variant of a plan, with everything resolved."""

    run: Run
    kinds: ByKind
    scores: list[Score]
    timed: list[SystemJob]
    elsewhere: dict[str, Run]
    """By corpus the same variant on it, where the plan has several; `run` is on the first."""
    trained: tuple[str, ...]
    """System evaluations that train models and are repeated on each corpus."""


def resolve_variant(settings: ComparisonSettings, name: str, words: Sequence[str], compose: Compose) -> Variant:
    """Resolve a variant of the plan, on every corpus."""
    plan = settings.plan
    corpora = plan.corpora or [None]
    on_each = {
        corpus: _composed(settings, name, [*words, *([f"data={corpus}"] if corpus is not None else [])], compose)
        for corpus in corpora
    }
    runs = {corpus: prepare(on_it) for corpus, on_it in on_each.items()}
    first, run = on_each[corpora[0]], runs[corpora[0]]
    kinds, num_seeds = by_kind(first), plan.num_search_seeds
    scores = [score for evaluation in kinds.probes for score in scores_of_probe(first, evaluation, num_seeds)]
    is_one = len(corpora) == 1
    if kinds.of_checkpoints:
        grid = plan.learning_rates or [first.train.learning_rate]
        scores += [
            score_of_training(on_it, kinds.of_checkpoints, grid, num_seeds, None if is_one else corpus)
            for corpus, on_it in runs.items()
        ]
    trained = [it for it in kinds.system if build(it.target, it.options, SystemEvaluation).trains]
    timed = [
        SystemJob(on_it, evaluation, corpus=None if is_one else corpus)
        for evaluation in kinds.system
        for corpus, on_it in (runs.items() if evaluation in trained else [(None, run)])
    ]
    elsewhere = {str(corpus): on_it for corpus, on_it in runs.items()} if not is_one else {}
    return Variant(run, kinds, scores, timed, elsewhere, tuple(it.name for it in trained))


def check_layers(name: str, run: Run) -> None:
    """Raise UserError if layers from outside attnbench break their contract, before anything is trained. Those that run
    on CUDA alone are checked where their trainings begin."""
    outside = [mixer for mixer in run.mixers if not is_own(class_named(mixer))]
    if not outside or (run.device.type != "cpu" and any(mixer.target != MODULE for mixer in outside)):
        return
    size = run.matched.model
    # A user's layer may raise anything.
    try:
        model = build_model(run.mixers, size, vocabulary_size=run.corpus.vocabulary_size, seed=run.seed)
        layers = [block.mixer for block in model.layers]
        check_causality(run.mixers, layers, size.dim, run.seq_len, "float32")
    except Exception as error:
        where = "" if isinstance(error, UserError) else line_beside(error, class_named(outside[0]).rpartition(".")[0])
        raise UserError(f"plan.variants.{name}: {one_line(error)}{where and f', at {where}'}") from error


def _composed(settings: ComparisonSettings, name: str, words: Sequence[str], compose: Compose) -> RunSettings:
    plan = settings.plan
    words = [f"device={settings.device}", *plan.overrides, *words]
    # An unknown evaluation is named before an option of one that is not asked for.
    unasked = [word for word in words if _is_of_unasked_evaluation(plan, word)]
    evaluations = f"eval=[{','.join(plan.evaluations)}]"
    composed = compose([evaluations, *(word for word in words if word not in unasked)])
    for evaluation in plan.evaluations:
        if evaluation not in [known.name for known in composed.evaluations]:
            raise UserError(f"plan.evaluations: {evaluation} is a list of evaluations; name each of them")
    if unasked:
        raise UserError(
            f"{unasked[0]} is of none of plan.evaluations={plan.evaluations}; to run some of a plan's "
            "evaluations, plan.only=[NAME]"
        )
    return replace(
        composed,
        mixer=replace(composed.mixer, name=name),
        experiment=plan.name,
        outputs_dir=settings.outputs_dir,
        logger=replace(settings.logger, name=None),
        rerun=settings.rerun,
    )


def _is_of_unasked_evaluation(plan: PlanSettings, word: str) -> bool:
    group, *options = setting_of(word).split(".")
    return group == "eval" and options[0] not in plan.evaluations
