"""A plan: its variants, their scores, and the programs that search rates and score at them."""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from attnbench.comparison.coinciding import Shared, shared_jobs
from attnbench.comparison.program import Answer, Driver, Execute, Failure, Program, ask_for, read_or_failure
from attnbench.comparison.search import Found, Score, check_control, rate_and_scores
from attnbench.comparison.variants import Compose, Variant, check_layers, resolve_variant
from attnbench.evals.base import Evaluation
from attnbench.evals.runners.probe import ProbeJob
from attnbench.results.corpora import Corpora, split_name
from attnbench.results.job import Job
from attnbench.results.metrics import Primary
from attnbench.results.row_files import read_results
from attnbench.results.rows import TRAINING, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve
from attnbench.settings.schema import FEW_SEEDS, LOOKS, ComparisonSettings
from attnbench.training.job import Run, corpus_label
from attnbench.verdict.claims import ControlScores
from attnbench.verdict.family import fewest_seeds_of, name_family
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import same_models

log = logging.getLogger(__name__)


class Comparison:
    """One plan, on this machine.

    Args:
        compose: turns overrides into settings; raises UserError for what this machine cannot do.
    """

    def __init__(self, settings: ComparisonSettings, compose: Compose) -> None:
        self.settings, self.plan = settings, settings.plan
        self.folder = Path(settings.outputs_dir) / self.plan.name
        self.failures: dict[str, str] = {}
        self.num_seeds: dict[tuple[str, str], int] = {}
        """Seeds by (evaluation, variant) that plan.seeds=auto has added to the first look's."""
        self.answers: dict[Path, Answer] = {}
        self.choices: list[Choice] = []
        self.controls: list[ControlScores] = []
        """Positive controls that are trained."""
        self.scored: list[Job] = []
        self.searched: list[Job] = []
        self.undecided: list[tuple[str, str]] = []
        """Scored runs that wait for a search: group and label."""
        self.variants: dict[str, Variant] = {}
        errors = {}
        for name, words in self.plan.variants.items():
            try:
                self.variants[name] = resolve_variant(settings, name, words, compose)
            except UserError as error:
                errors[name] = str(error)
        for name, reason in errors.items():
            # An error of all variants is one of the plan.
            if len(errors) == len(self.plan.variants) and len(set(errors.values())) == 1:
                raise UserError(reason)
            raise UserError(f"plan.variants.{name}: {reason} (plan.variants.{name}=null leaves this variant out)")
        for name, variant in self.variants.items():
            check_layers(name, variant.run)
        corpora = {name: corpus_label(variant.run.corpus) for name, variant in self.variants.items()}
        if len(set(corpora.values())) > 1:
            named = ", ".join(f"{name} reads {corpus}" for name, corpus in corpora.items())
            raise UserError(f"plan.variants: scores on different corpora compare nothing; {named}")
        self.corpora = self._corpora()
        self.shared = shared_jobs(self.variants)
        variants = self.variants.values()
        scores = [score for variant in variants for score in variant.scores]
        timed = [job for variant in variants for job in variant.timed]
        self.scores = [score for score in scores if not self._is_shared(score.variant, score.evaluation)]
        """All scores; a score that variants share is listed once."""
        self.timed = self.in_order([job for job in timed if not self._is_shared(job.run.mixer, job.evaluation)])
        """Timed jobs, which run alone on their device."""
        for line in same_models(self.shared):
            log.info(f"{line}: run once")

    def _corpora(self) -> Corpora | None:
        """None for a plan of one corpus."""
        if len(self.plan.corpora or []) < 2:
            return None
        variants = list(self.variants.values())
        names: dict[str, str] = {}
        for corpus, run in variants[0].elsewhere.items():
            label = corpus_label(run.corpus)
            if label in names:
                raise UserError(
                    f"plan.corpora: {names[label]} and {corpus} are one text, {label}; leave one of them out"
                )
            names[label] = corpus
        trained = [name for variant in variants for name in variant.trained]
        return Corpora(names=names, evaluations=list(dict.fromkeys([TRAINING, *self._of_checkpoints(), *trained])))

    def names_of(self, evaluation: str) -> list[str]:
        """List the names of an evaluation in verdicts and reports: one for each corpus it is repeated on."""
        return self.corpora.named(evaluation) if self.corpora is not None else [evaluation]

    def scored_rows(self) -> list[ResultRow]:
        """Each evaluation has its name in verdicts."""
        rows = [row for job in self.scored for row in self.rows_of(job)]
        return self.corpora.by_corpus(rows) if self.corpora is not None else rows

    def _is_shared(self, variant: str, evaluation: str) -> bool:
        return variant in self.shared.get(evaluation, {})

    def _of_checkpoints(self) -> list[str]:
        return [evaluation.name for variant in self.variants.values() for evaluation in variant.kinds.of_checkpoints]

    def shared_by_evaluation(self) -> Shared:
        """Return `shared` by names of evaluations in rows; evaluations of checkpoints are shared like the training."""
        of_training = self.shared.get(TRAINING)
        shared = self.shared | {name: of_training for name in self._of_checkpoints() if of_training is not None}
        return {name: by_variant for evaluation, by_variant in shared.items() for name in self.names_of(evaluation)}

    def wanted(self, jobs: Sequence[Job]) -> list[Job]:
        """See `plan.only`."""
        return [job for job in jobs if self.is_wanted(job.evaluation)]

    def is_wanted(self, group: str) -> bool:
        """A training belongs to every evaluation of its checkpoints."""
        names = set(self._of_checkpoints()) if group == TRAINING else {group}
        return not names.isdisjoint(self.plan.only or self.plan.evaluations)

    def programs(self, found: Found) -> list[Program[None]]:
        """List the programs, in the order of the plan's evaluations."""
        order = self._order()
        scores = sorted(self.scores, key=lambda score: order[score.evaluation])
        return [rate_and_scores(score, self.seeds_of(score), found) for score in scores]

    def carry_out(self, driver: Driver, found: Found, execute: Execute | None = None) -> bool:
        """Run the positive controls, and the programs unless one failed; tell if none did."""
        controls = self.plan.claim.controls if self.plan.claim is not None else []
        of_controls = [
            check_control(score, control, found)
            for control in controls
            for score in self.scores
            if score.variant == self.shared.get(score.evaluation, {}).get(control.variant, control.variant)
        ]
        driver.run(of_controls, execute)
        if driver.failures or not all(control.is_held for control in found.controls):
            return False
        driver.run(self.programs(found), execute)
        return True

    def settle(self, answers: dict[Path, Answer] | None = None) -> None:
        """Advance the programs as far as finished runs allow, without running any; keep the answers, the choices, the
        scored runs, and the runs that wait for a search.

        Args:
            answers: of runs that were read already.
        """
        found, driver = Found(), Driver(answers=dict(answers or {}))
        if self.carry_out(driver, found):
            driver.run([ask_for(self.timed)])
        self.answers, self.controls = driver.answers, found.controls
        self.choices = [found.choices[score.name] for score in self.scores if score.name in found.choices]
        self.scored = self.in_order([job for score in self.scores for job in found.scored.get(score.name, [])])
        of_scores = {job.folder for job in (*self.scored, *self.timed)}
        self.searched = [job for job in driver.asked.values() if job.folder not in of_scores]
        self.undecided = [
            (score.evaluation, f"{score.name}, {len(self.seeds_of(score))} scored")
            for score in self.scores
            if score.name in found.undecided
        ]

    def shown(self) -> list[Job]:
        """The scored and the timed runs."""
        return [*self.scored, *self.timed]

    def is_finished(self, job: Job) -> bool:
        return isinstance(self.answers.get(job.folder), list)

    def results_of(self, jobs: Iterable[Job]) -> list[Path]:
        """List the results files of these runs, for a failed run those that exist."""
        return [
            path
            for job in jobs
            for path in job.all_results
            if self.is_finished(job) or (path.exists() and not isinstance(read_or_failure([path]), Failure))
        ]

    def rows_of(self, job: Job) -> list[ResultRow]:
        """Return the rows of a run, for a failed run those that exist."""
        answer = self.answers.get(job.folder)
        return answer if isinstance(answer, list) else [*chain(*map(read_results, self.results_of([job])))]

    def to_score(self) -> list[ProbeJob | Run]:
        """List a training for each run that will be scored; its rate and seed are arbitrary."""
        if not all(control.is_held for control in self.controls):
            return []
        return [
            score.prepared for score in self.scores if self.is_wanted(score.evaluation) for _ in self.seeds_of(score)
        ]

    @property
    def samples(self) -> int | None:
        """Sequences of the longest scored training."""
        prepared = [score.prepared for score in self.scores if self.seeds_of(score)]
        return max((job.num_steps * job.train.batch_size for job in prepared), default=None)

    def evaluations(self) -> dict[str, type[Evaluation]]:
        """Return the classes by name, in the plan's order, repeated for each corpus."""
        listed = {entry.name: entry for variant in self.variants.values() for entry in variant.run.settings.evaluations}
        known = [evaluation for evaluation in self.plan.evaluations if evaluation in listed]
        return {
            name: resolve(listed[evaluation].target, Evaluation)
            for evaluation in known
            for name in self.names_of(evaluation)
        }

    def primaries(self) -> dict[str, Primary]:
        tested = self.plan.evaluations if self.plan.tested is None else self.plan.tested
        by_evaluation = {name: cls.primary for name, cls in self.evaluations().items() if split_name(name)[0] in tested}
        return {name: primary for name, primary in by_evaluation.items() if primary is not None}

    def family(self, evaluations: Sequence[str] | None = None) -> list[tuple[str, str, str]]:
        """Name the tested pairs (evaluation, first, second), or those of the given evaluations."""
        return name_family(
            rank=self.plan.ranked,
            reference=self.plan.reference,
            evaluations=list(self.primaries()) if evaluations is None else evaluations,
            shared=self.shared_by_evaluation(),
        )

    def descriptive(self) -> list[str]:
        """Say for each untested primary metric why it is not tested."""
        if not self.plan.ranked:
            few = max(self.seeds_by_evaluation()[0].values(), default=0)
            why = f": {few} {'seed' if few == 1 else 'seeds'} cannot rank mixers" * (few <= FEW_SEEDS)
            return [f"Nothing is tested in this plan{why}."]
        tested, number = self.primaries(), self.seeds_by_evaluation()[0]
        others = {
            name: cls.primary
            for name, cls in self.evaluations().items()
            if cls.primary is not None and name not in tested
        }
        family = self.family([*tested, *others])
        if not family:
            return []

        def reason(name: str, primary: Primary) -> str:
            fewest = fewest_seeds_of(primary, len(family))
            if fewest > number[name]:
                return f"a test would take {fewest} seeds, and there are {number[name]}"
            return "plan.tested leaves it out, so that a test of what is in it takes fewer seeds"

        return [
            f"{primary.metric} of {name} has no verdict in this plan: {reason(name, primary)}."
            for name, primary in others.items()
        ]

    def seeds_by_evaluation(self) -> tuple[dict[str, int], dict[str, str]]:
        """Count the seeds of every evaluation, and name their setting."""
        of_checkpoints = set(self._of_checkpoints())
        settings = {
            name: "plan.seeds" if split_name(name)[0] in of_checkpoints else "plan.probe_seeds"
            for name in self.evaluations()
        }
        number = {"plan.seeds": len(self.plan.seeds), "plan.probe_seeds": len(self.plan.probe_seeds)}
        return {name: number[setting] for name, setting in settings.items()}, settings

    def protocols(self) -> dict[str, dict[str, Any]]:
        """See `results.protocol`."""
        jobs = [job for score in self.scores for job in score.at(score.grid[0], 0, None).parts]
        known = {job.evaluation: job.protocol() for job in [*jobs, *self.timed]}
        return {
            name: protocol
            for evaluation, protocol in known.items()
            if protocol is not None
            for name in self.names_of(evaluation)
        }

    def plain_seeds_of(self, score: Score) -> Sequence[int]:
        """Seeds of a score without the control's."""
        if score.variant in self.plan.unscored:
            return []
        seeds = self.plan.seeds if score.evaluation == TRAINING else self.plan.probe_seeds
        if not self.plan.in_looks:
            return seeds
        return seeds[: self.num_seeds.get((score.evaluation, score.variant), min(LOOKS))]

    def _control_seeds_of(self, score: Score) -> list[int]:
        shared = self.shared.get(score.evaluation, {})
        is_reference = score.variant == shared.get(self.plan.reference or "", self.plan.reference)
        return self.plan.control_seeds(self.plain_seeds_of(score)) if is_reference else []

    def seeds_of(self, score: Score) -> list[int]:
        """Seeds of a score with the control's."""
        return [*self.plain_seeds_of(score), *self._control_seeds_of(score)]

    def control_seeds(self) -> list[int]:
        """Seeds of the control in any evaluation."""
        return sorted({seed for score in self.scores for seed in self._control_seeds_of(score)})

    def _order(self) -> dict[str, int]:
        order = {name: index for index, name in enumerate(self.plan.evaluations)}
        order[TRAINING] = min((order[name] for name in self._of_checkpoints()), default=0)
        return order

    def in_order(self, jobs: list[Job]) -> list[Job]:
        """Sort runs by evaluation, in the plan's order."""
        order = self._order()
        return sorted(jobs, key=lambda job: order[job.evaluation])

    def fail(self, label: str, reason: str) -> None:
        """The other runs go on."""
        self.failures[label] = reason
        log.error(f"failed: {label}: {reason}")
