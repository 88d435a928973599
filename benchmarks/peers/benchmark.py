"""The command: cases beside peers, or first steps, or agreement."""

from attnbench.cli.compose import compose
from attnbench.machine.device import resolve_device
from attnbench.machine.locks import device_lock
from benchmarks.peers.cases import CASES
from benchmarks.peers.contestants import Request
from benchmarks.peers.trainings import run_agreement, run_first_steps
from benchmarks.peers.turns import run_case


def benchmark(request: Request) -> None:
    """Measure what was asked for.

    Raises:
        UserError: an unknown case, counts that are none, or settings that cannot be.
    """
    request.check()
    device = resolve_device(compose(list(request.overrides)).device)
    with device_lock(device, shared=False):
        if request.first_step:
            run_first_steps(request)
        elif request.agreement_steps is not None:
            run_agreement(request, request.agreement_steps)
        else:
            for case in CASES.values():
                if case.name in request.cases if request.cases else case.device == device.type:
                    run_case(case, request)
