"""One evaluation of a trained model, in the folder of its training."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from attnbench.evals.base import CheckpointEvaluation
from attnbench.evals.lib.rows import until_out_of_memory
from attnbench.machine.group import Group
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.job import Job
from attnbench.results.protocol import protocol_of
from attnbench.results.row_files import read_results
from attnbench.results.rows import Measurement
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import EvaluationSettings
from attnbench.training.checkpoint import is_final
from attnbench.training.job import TrainingJob, trained_on
from attnbench.training.prepare import Run, row_settings


class EvaluationJob(Job):
    """A checkpoint evaluation of a run; where its training failed, rows that say so."""

    def __init__(self, run: Run, settings: EvaluationSettings) -> None:
        self.run, self.settings = run, settings
        code = code_of([settings.target], ["evals"])
        self.label = f"evaluating {settings.name} of {run.mixer}"
        self.experiment, self.evaluation = run.settings.experiment, settings.name
        self.config_hash = hash_with_code([run.config_hash, settings.target, settings.options], code)
        self.folder, self.device, self.rerun = run.folder, run.device, run.settings.rerun
        cls = resolve(settings.target, CheckpointEvaluation)
        self.plots, self.primary = cls.plots, cls.primary

    def columns(self) -> dict[str, Any]:
        return {**self.run.columns(), "num_devices": trained_on(self.run)}

    def row_settings(self) -> dict[str, Any]:
        return row_settings(self.run, self.settings)

    def protocol(self) -> dict[str, Any]:
        return protocol_of(self.primary)

    def rows(self) -> Iterator[Measurement]:
        target, options = self.settings.target, self.settings.options
        built = build(target, options, CheckpointEvaluation)
        if is_final(self.run.checkpoints):
            instead = partial(built.failed, self.run, "out_of_memory")
            yield from until_out_of_memory(iter(built.run(self.run)), instead)
            return
        of_training = (row.measurement for row in read_results(TrainingJob(self.run).results))
        failed = next(row for row in of_training if row.status != "ok")
        yield from built.failed(self.run, failed.status, failed.reason)


def language_model_jobs(run: Run, group: Group | None = None) -> tuple[Job, ...]:
    """The training of a language model and the evaluations of its checkpoints that its settings name.

    Args:
        group: the processes that train it together; what evaluates it is this one alone.
    """
    return TrainingJob(run, group), *(EvaluationJob(run, evaluation) for evaluation in run.settings.evaluations)
