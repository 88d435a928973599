"""Running of the doctor's checks, on a GPU in as many processes as there are cores.

Most of the time on a GPU is compiling kernels for each width, precision and layout, so worker processes run the checks
in the order of `_urgency`, and this process prints them in theirs.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnbench.correctness.checks import LENGTH_IN_PIECES, Check, Error, build_mixer
from attnbench.correctness.operators import operator_errors
from attnbench.machine.processes import run_in_processes
from attnbench.mixers.base import Mixer, ReturnError
from attnbench.mixers.contract import ALL_LENGTHS, PROMISES
from attnbench.mixers.definition import TOLERANCES, Computed, by_definition, by_state, deviation, limits
from attnbench.mixers.relative_errors import relative_error, worst
from attnbench.settings.errors import UserError, line_beside, one_line
from attnbench.settings.registry import class_named, is_own, resolve

EXPECTED: dict[tuple[str, str, int], Computed] = {}
"""Results of definitions in a worker process, which may get further checks of a mixer; see `run`."""

WORKER_MIB = 2048
"""Device memory for each worker, most of it CUDA's own."""


def run(check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]) -> None:
    """Fill in the errors or the failure of a check that is not refused. Missing results of definitions are added to
    `expected`, by mixer, case and length."""
    # Any exception of a kernel or its compiler is a finding.
    try:
        if check.refusal:
            return
        if check.kind == "training":
            _hold_against_definition(check, device, expected)
        elif check.kind == "decoding":
            _hold_decoding(check, device, expected)
        elif check.kind == "operator":
            errors = operator_errors(check.name, check.precision, device)
            allowed = TOLERANCES[check.precision]
            check.errors = [Error(f"{part}_error", value, allowed, {}) for part, value in errors.items()]
        else:
            (promise,) = (promise for promise in PROMISES if promise.words == check.name)
            check.failure = promise.check(build_mixer(check.mixer, device), ALL_LENGTHS)
    except Exception as error:
        # A mixer may refuse an option of a case.
        if check.case.options and isinstance(error, UserError) and not isinstance(error, ReturnError):
            check.refusal = str(error)
        else:
            check.failure = one_line(error)
            target = class_named(check.mixer)
            check.where = "" if is_own(target) else line_beside(error, target.rpartition(".")[0])


def _hold_against_definition(
    check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]
) -> None:
    mixer = build_mixer(check.mixer, device, check.case)
    allowed = limits(TOLERANCES[check.precision] * check.case.slack)
    for length in check.case.lengths:
        key = (check.mixer.name, check.case.name, length)
        if key not in expected:
            expected[key] = by_definition(mixer, length, check.case)
        held = deviation(mixer, length, check.precision, check.case, expected[key])
        for part, limit in allowed.items():
            settings: dict[str, Any] = {"sequence_length": length}
            if held.is_beyond_rounding:
                settings |= {"beyond_rounding": True}
            if part == "parameter_gradient":
                settings |= {"parameter": held.parameter}
            check.errors.append(Error(f"{part}_error", getattr(held, part), limit, settings))


def _hold_decoding(check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]) -> None:
    mixer, key = build_mixer(check.mixer, device), (check.mixer.name, "", LENGTH_IN_PIECES)
    if key not in expected:
        expected[key] = by_definition(mixer, LENGTH_IN_PIECES)
    pieces = by_state(mixer, LENGTH_IN_PIECES, check.precision)
    # Each by itself: a few wrong steps would not show in the whole.
    parts = expected[key].output_BTD.split([piece.shape[1] for piece in pieces], dim=1)
    largest = worst(relative_error(piece, part) for piece, part in zip(pieces, parts, strict=True))
    check.errors = [Error("output_error", largest, TOLERANCES[check.precision], {})]


def run_all(checks: Sequence[Check], device: torch.device) -> Generator[Check, None, None]:
    """Run the checks, in workers with a GPU and a second core, and yield them in order."""
    num_processes = num_workers(device)
    if num_processes > 1:
        yield from _run_in_workers(checks, device, num_processes)
        return
    expected: dict[tuple[str, str, int], Computed] = {}
    for check in checks:
        run(check, device, expected)
        yield check


def _run_in_workers(checks: Sequence[Check], device: torch.device, num_processes: int) -> Iterator[Check]:
    urgency = _urgency(checks)
    items = sorted(((index, check, device) for index, check in enumerate(checks)), key=lambda item: urgency[item[0]])
    done: dict[int, Check] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "workers.log"
        outcomes = run_in_processes(run_in_worker, items, num_workers=num_processes, log=log, num_threads=1)
        with closing(outcomes):
            for index in range(len(checks)):
                while index not in done:
                    outcome = next(outcomes)
                    number, planned, _ = outcome.item
                    done[number] = outcome.result or replace(planned, failure=outcome.error)
                yield done[index]


def _urgency(checks: Sequence[Check]) -> list[tuple[int, ...]]:
    """The longest come first: fla, which tunes its launches, then kernels to compile. Checks that share kernels are far
    apart, so that the second finds them in the compiler's cache."""
    seen, places = Counter(), []
    for check in checks:
        key = (_family(check), check.kind, check.case.head_width, check.precision, check.backend)
        places.append((check.backend == "torch", check.backend != "fla", seen[key]))
        # A refused check compiles nothing.
        seen[key] += not check.refusal
    return places


def _family(check: Check) -> Any:
    """Checks of one operator, by name, recurrence or class, share kernels."""
    if check.kind == "operator":
        return check.name
    try:
        mixer = resolve(check.mixer.target, Mixer)
    except UserError:
        # The check reports the error.
        return check.name
    return getattr(mixer, "operator", None) or mixer


def num_workers(device: torch.device) -> int:
    """Each has a core and WORKER_MIB of the GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free_mib = torch.cuda.mem_get_info(device)[0] // 2**20
    return min(len(os.sched_getaffinity(0)), free_mib // WORKER_MIB)


def run_in_worker(item: tuple[int, Check, torch.device]) -> Check:
    _, check, device = item
    run(check, device, EXPECTED)
    return check
