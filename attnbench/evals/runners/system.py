"""One system evaluation of one mixer: timed or weighed alone on its device, in a folder of its own.

outputs/<experiment>/cells/<evaluation>-<variant>-<model>-T<seq_len>-<hash>/
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from attnbench.evals.base import SystemEvaluation
from attnbench.evals.lib.rows import first_metric_without_number, until_out_of_memory
from attnbench.machine.device import environment
from attnbench.machine.locks import device_lock
from attnbench.results.folder import ROOT, recording, stamp_environment, write_config
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.rows import ResultsWriter, is_complete
from attnbench.settings.registry import build
from attnbench.settings.schema import EvaluationSettings, RunSettings
from attnbench.training.prepare import Run, identity, prepare, resolved_config, row_settings

log = logging.getLogger(__name__)

UNHASHED = ("commit", "dirty", "platform", "python")
"""What a speed does not depend on, or what is compared across: the report flags rows of several commits."""


def prepare_system(prepared: Run, evaluation: EvaluationSettings) -> tuple[Run, Path]:
    """The subject, in a folder of its own, and its results file.

    What is timed or weighed depends on the device and on the libraries too, so they are in the hash.
    """
    settings = prepared.settings
    machine = {name: value for name, value in environment(prepared.device, ROOT).items() if name not in UNHASHED}
    code = code_of([evaluation.target], ["evals", "timing"])
    hashed = hash_with_code([prepared.config_hash, evaluation.target, evaluation.options, machine], code)
    words = [evaluation.name, settings.mixer.name, settings.model.name, f"T{settings.seq_len}", hashed]
    folder = Path(settings.outputs_dir) / settings.experiment / "cells" / "-".join(words)
    return replace(prepared, folder=folder), folder / "results" / f"{evaluation.name}-{hashed}.jsonl"


def run_system(settings: RunSettings, evaluation: EvaluationSettings) -> Path:
    """Measures, unless complete results are there; returns their file. For a process that has done nothing else."""
    prepared, path = prepare_system(prepare(settings), evaluation)
    built = build(evaluation.target, evaluation.options, SystemEvaluation)
    with recording(prepared.folder, waits=True), device_lock(prepared.device, shared=False):
        # Asked inside: another process may have finished it while this one waited.
        if not settings.rerun and is_complete(path):
            return path
        write_config(prepared.folder, resolved_config(prepared))
        stamp = stamp_environment(prepared.folder, prepared.device)
        whose = identity(prepared, stamp, path)
        if built.own_sizes:
            whose = replace(whose, model="", parameters=None)
        with ResultsWriter(path, whose, row_settings(prepared, evaluation)) as writer:
            instead = partial(first_metric_without_number, built, evaluation.name)
            for measurement in until_out_of_memory(iter(built.run(prepared)), instead):
                row = writer.write(measurement).measurement
                log.info(f"{row.metric} {measurement.settings}: {row.value if row.value is not None else row.status}")
    return path
