"""A system evaluation of one mixer, alone on its device, in a folder of its own.

outputs/<experiment>/cells/<evaluation>-<variant>-<model>-T<seq_len>-<hash>/
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attnbench.evals.base import SystemEvaluation
from attnbench.evals.lib.reference import beside_reference
from attnbench.evals.lib.rows import first_metric_without_number, until_out_of_memory
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.environment import machine
from attnbench.results.corpora import on_corpus
from attnbench.results.folder import ROOT
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.job import Job
from attnbench.results.protocol import protocol_of
from attnbench.results.row_files import ResultsWriter
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import EvaluationSettings
from attnbench.training.job import Run

log = logging.getLogger(__name__)


class SystemJob(Job):
    """A system evaluation of a run's mixer, for a process that has done nothing else.

    Args:
        there: `environment.timed_entries` of another machine that measured it; None: this machine.
        corpus: name of the run's corpus, if a plan has several.
    """

    is_timed = True

    def __init__(
        self,
        run: Run,
        settings: EvaluationSettings,
        there: Mapping[str, Any] | None = None,
        corpus: str | None = None,
    ) -> None:
        self.run, self.settings, given = run, settings, run.settings
        code = code_of([settings.target], ["evals", "timing"])
        self.label = self.task_label = on_corpus(f"{settings.name} {run.mixer}", corpus)
        self.experiment, self.evaluation = given.experiment, settings.name
        identity = [run.config_hash, settings.target, settings.options, there or machine(run.device, ROOT)]
        self.config_hash = hash_with_code(identity, code)
        words = [settings.name, given.mixer.name, given.model.name, f"T{given.seq_len}", self.config_hash]
        self.folder = Path(given.outputs_dir) / given.experiment / "cells" / "-".join(words)
        self.device, self.rerun = run.device, given.rerun
        cls = resolve(settings.target, SystemEvaluation)
        self.plots, self.own_sizes, self.primary = cls.plots, cls.own_sizes, cls.primary

    def columns(self) -> dict[str, Any]:
        sizes = {"model": "", "parameters": None} if self.own_sizes else {}
        return {**self.run.columns(), **sizes, "num_devices": 1}

    def row_settings(self) -> dict[str, Any]:
        return self.run.row_settings(self.settings)

    def protocol(self) -> dict[str, Any]:
        return protocol_of(self.primary)

    def config(self) -> dict[str, Any]:
        return self.run.config()

    def rows(self) -> Iterator[Measurement]:
        group = f"eval.{self.evaluation}"
        built = build(self.settings.target, self.settings.options, SystemEvaluation, group=group)
        instead = partial(first_metric_without_number, built, self.evaluation)
        measured = until_out_of_memory(iter(built.run(self.run)), instead)
        yield from beside_reference(self.run, measured) if isinstance(built, Timed) else measured

    def write(self, writer: ResultsWriter, measurement: Measurement) -> ResultRow:
        """Log each row: a measurement may take minutes."""
        row = super().write(writer, measurement)
        value = row.measurement.value if row.measurement.value is not None else row.measurement.status
        log.info(f"{row.measurement.metric} {measurement.settings}: {value}")
        return row
