"""What scripts/benchmark_peers.py does: cases beside peers, or first steps, or agreement; then the page so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnbench.machine.device import resolve_device
from attnbench.machine.locks import device_lock
from attnbench.settings.errors import UserError
from benchmarks.peers.agreement import run_agreement
from benchmarks.peers.cases import CASES
from benchmarks.peers.first_step import run_first_steps
from benchmarks.peers.page import write_page
from benchmarks.peers.turns import Compose, Places, Repetition, run_case

TITLE = "Training steps beside peers"


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """The command line."""

    overrides: Sequence[str]
    """Settings of train.py that win over those of the cases."""
    cases: Sequence[str] | None
    """Names; None for all that are meant for the device."""
    mixers: Sequence[str]
    """Of first steps and agreement."""
    places: Places
    repeats: int
    seconds: float
    first_step: bool
    agreement_steps: int | None
    outputs: Path
    command: str


def benchmark(request: Request, compose: Compose) -> None:
    """Measures what was asked for, and writes README.md and results.csv of all that lies in the outputs' folder.

    Raises:
        UserError: an unknown case, counts that are none, settings that cannot be, or nothing measured.
    """
    check(request)
    device = resolve_device(compose(list(request.overrides)).device)
    with device_lock(device, shared=False):
        if request.first_step:
            folder = request.outputs / "first-step"
            run_first_steps(
                request.mixers,
                compose,
                request.overrides,
                folder,
                limit_seconds=request.places.limit_seconds,
                command=request.command,
                say=_say,
            )
        elif request.agreement_steps is not None:
            run_agreement(
                request.mixers,
                compose,
                request.overrides,
                request.outputs / "agreement",
                num_steps=request.agreement_steps,
                limit_seconds=request.places.limit_seconds,
                command=request.command,
                say=_say,
            )
        else:
            _run_cases(request, compose, device.type)
    write_page(request.outputs, request.outputs, title=TITLE, with_figures=False)
    _say(f"written: {request.outputs / 'README.md'}")


def _run_cases(request: Request, compose: Compose, device_type: str) -> None:
    for case in CASES.values():
        if case.name in request.cases if request.cases else case.device == device_type:
            run_case(
                case,
                compose,
                request.overrides,
                request.outputs / case.name,
                places=request.places,
                repetition=Repetition(repeats=request.repeats, seconds=request.seconds),
                command=request.command,
                say=_say,
            )


def check(request: Request) -> None:
    """Raises UserError for what cannot be asked for."""
    unknown = [name for name in request.cases or () if name not in CASES]
    if unknown:
        raise UserError(f"--cases {' '.join(unknown)}: unknown; there is {', '.join(CASES)}")
    if request.repeats < 1:
        raise UserError(f"--repeats {request.repeats}: must be at least 1")
    if not request.seconds > 0:
        raise UserError(f"--seconds {request.seconds}: must be above 0")
    if not request.places.limit_seconds > 0:
        raise UserError(f"--limit {request.places.limit_seconds:g}: must be above 0")
    if request.agreement_steps is not None and request.agreement_steps < 2:
        raise UserError(f"--agreement {request.agreement_steps}: must be at least 2")


def _say(line: str) -> None:
    print(line, flush=True)
