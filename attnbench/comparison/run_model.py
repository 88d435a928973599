"""What train.py and evaluate.py do: one language model, and any evaluations of its mixer."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attnbench.comparison.cells import Cell, by_kind, execute, system_cell
from attnbench.comparison.search import probe_cells, probe_choice, probe_searches
from attnbench.evals.runners.prepare_probe import build_tasks
from attnbench.evals.runners.training import evaluate, run_training, training_results
from attnbench.machine.device import resolve_device, start_afresh
from attnbench.machine.locks import device_lock
from attnbench.machine.processes import run_alone
from attnbench.machine.signals import interruptible
from attnbench.results.files import replace_file
from attnbench.results.folder import holding
from attnbench.results.rows import is_complete
from attnbench.settings.documents import MOST_JSON_BYTES, read_bounded
from attnbench.settings.schema import EvaluationSettings, RunSettings
from attnbench.training.prepare import Run, reopen

log = logging.getLogger(__name__)


def run(settings: RunSettings) -> Path:
    """Trains, unless a finished run of the same settings is there, evaluates, and returns the run's folder.

    What needs no checkpoint (probes, speed, memory) has folders of its own under cells/.

    Raises:
        UserError: a corpus that cannot be read, a training that diverged, a damaged checkpoint.
        Interrupted: a signal asked to stop, and the state is kept.
    """
    of_checkpoints, probes, system = by_kind(settings)
    prepared = run_training(replace(settings, evaluations=of_checkpoints))
    _run_cells(prepared, settings, probes, system)
    return prepared.folder


def evaluate_again(folder: Path, settings: RunSettings) -> Path:
    """Evaluates a run that was trained before; only what is not there yet is measured.

    Args:
        settings: what the run's config.yaml says, with the evaluations wanted now and the device to use.

    Raises:
        UserError: no finished training is there, or its corpus cannot be found any more.
    """
    prepared = reopen(folder, settings)
    of_checkpoints, probes, system = by_kind(settings)
    with holding(folder, waits=True), device_lock(prepared.device, shared=True):
        if not is_complete(training_results(prepared)):
            log.warning(f"{folder}: the rows of its training are missing; the command that trained it makes them again")
        for evaluation in of_checkpoints:
            evaluate(prepared, evaluation)
    _run_cells(prepared, settings, probes, system)
    return folder


def _run_cells(
    prepared: Run,
    settings: RunSettings,
    probes: Sequence[EvaluationSettings],
    system: Sequence[EvaluationSettings],
) -> None:
    cells = []
    for evaluation in probes:
        for cell in probe_searches(settings, evaluation):
            _run_cell(cell)
        for index in range(len(build_tasks(settings, evaluation)[1])):
            choice = probe_choice(settings, evaluation, index)
            for cell in probe_cells(settings, evaluation, index, choice.chosen, [settings.seed]):
                _run_cell(cell)
                cells.append(cell)
    # What this process holds on the device would count against those that follow.
    start_afresh(resolve_device(settings.device))
    with interruptible("stopped; the same command goes on from what is finished"):
        for evaluation in system:
            cell = system_cell(prepared, evaluation)
            if not cell.is_done() or settings.rerun:
                log.info(f"{cell.label} (in a process of its own)")
                output = cell.results[0].parents[1] / "output.log"
                run_alone(execute, cell, log=output, num_threads=torch.get_num_threads())
            cells.append(cell)
    with holding(prepared.folder, waits=True):
        remember_cells(prepared.folder, cells)


def _run_cell(cell: Cell) -> None:
    if not cell.is_done() or cell.settings.rerun:
        log.info(cell.label)
        execute(cell)


def remember_cells(folder: Path, cells: Sequence[Cell]) -> None:
    """Keeps in the run's cells.txt where its other results are, one folder a line, from the experiment's folder.

    Cells of an evaluation that was made again, with other settings, take the place of the former ones.
    """
    path, experiment = folder / "cells.txt", folder.parent
    known = read_bounded(path, MOST_JSON_BYTES).splitlines() if path.exists() else []
    made_now = tuple(f"cells/{cell.group}-" for cell in cells)
    found = [cell.results[0].parents[1].relative_to(experiment).as_posix() for cell in cells]
    lines = [*(line for line in known if not line.startswith(made_now)), *found]
    if lines:
        replace_file(path, "".join(f"{line}\n" for line in lines))
