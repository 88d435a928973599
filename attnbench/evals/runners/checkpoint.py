"""An evaluation of a trained model, in the training's folder."""

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
from attnbench.settings.errors import UserError
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import EvaluationSettings
from attnbench.training.checkpoint import is_final
from attnbench.training.job import FAILED, Run, trained_on


class EvaluationJob(Job):
    """Yields rows without numbers where the training failed."""

    def __init__(self, run: Run, settings: EvaluationSettings) -> None:
        self.run, self.settings = run, settings
        code = code_of([settings.target], ["evals"])
        self.label = self.task_label = f"evaluating {settings.name} of {run.mixer}"
        self.experiment, self.evaluation = run.settings.experiment, settings.name
        self.config_hash = hash_with_code([run.config_hash, settings.target, settings.options], code)
        self.folder, self.device, self.rerun = run.folder, run.device, run.settings.rerun
        cls = resolve(settings.target, CheckpointEvaluation)
        self.plots, self.primary = cls.plots, cls.primary

    def columns(self) -> dict[str, Any]:
        return {**self.run.columns(), "num_devices": trained_on(self.run)}

    def row_settings(self) -> dict[str, Any]:
        return self.run.row_settings(self.settings)

    def protocol(self) -> dict[str, Any]:
        return protocol_of(self.primary)

    def begin(self) -> dict[str, Any]:
        """Look for the checkpoint before former results are replaced."""
        self._failure()
        return super().begin()

    def _failure(self) -> Measurement | None:
        """Return the row that says why the training failed; None if its checkpoint is there. Raises UserError if
        neither is there: somebody may have removed the checkpoint."""
        if is_final(self.run.checkpoints):
            return None
        path = self.run.results
        rows = [row.measurement for row in read_results(path)] if path.exists() else []
        failed = next((row for row in rows if row.status in FAILED), None)
        if failed is None:
            raise UserError(
                f"{self.run.checkpoints / 'final'}: was removed before {self.settings.name} could read it; the command "
                "that trained it trains it again"
            )
        return failed

    def rows(self) -> Iterator[Measurement]:
        target, options = self.settings.target, self.settings.options
        built = build(target, options, CheckpointEvaluation, group=f"eval.{self.evaluation}")
        failed = self._failure()
        if failed is None:
            instead = partial(built.failed, self.run, "out_of_memory")
            yield from until_out_of_memory(iter(built.run(self.run)), instead)
            return
        yield from built.failed(self.run, failed.status, failed.reason)


def language_model_job(run: Run, group: Group | None = None) -> Run:
    """Return a language model's training, by the processes of `group`, with the evaluations of its checkpoints."""
    run.group = group
    run.evaluations = tuple(EvaluationJob(run, evaluation) for evaluation in run.settings.evaluations)
    return run
