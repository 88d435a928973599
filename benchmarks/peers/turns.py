"""Cases measured in turns: ours, a peer, ours, a peer."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attnbench.evals.lib.rows import without_numbers
from attnbench.results.rows import Measurement
from benchmarks.peers.cases import ABSENT, OURS, Case
from benchmarks.peers.contestants import Contestant, Request, say, start_anew
from benchmarks.peers.steps import Order

NUM_WARMUP = 6
"""Steps after the first: a captured step is recorded in the fourth."""

MAX_STEPS = 1000
"""Most steps of one turn."""

NO_DEVICE_MEMORY = "reserved memory is counted on CUDA devices alone"

UNITS = {"tokens_per_second": "tokens/s", "peak_memory_mib": "MiB", "first_step_seconds": "s"}


def run_case(case: Case, request: Request) -> bool:
    """Measure one case, replacing what is there; False where no peer is present, which it says."""
    folder = request.outputs / case.name
    with ExitStack() as stack:
        contestants = _built(case, request, folder, stack)
        if not contestants:
            say(f"{case.name}: skipped, no peer is here")
            return False
        start_anew(folder, case.name, request, _title(case, contestants[0]))
        for _ in _turns(contestants, request):
            # After each: what takes minutes to start should not be lost with the turns that are missing.
            for contestant in contestants:
                contestant.keep(list(_measurements(case, contestant, contestants)))
    return True


def _title(case: Case, ours: Contestant) -> str:
    """The shape that was really run, whatever the case's name says."""
    settings = ours.settings
    tokens = f"{settings.train.batch_size} × {settings.seq_len:,} tokens"
    if case.kind != "ours":
        heads, width = case.options["shape"][2:]
        return f"{case.kind.replace('_', ' ')}, forward and backward, {tokens}, {heads} heads of {width}"
    return f"{settings.mixer.name}, {tokens}, {settings.model.num_layers} layers of {settings.model.dim}"


def _built(case: Case, request: Request, folder: Path, stack: ExitStack) -> list[Contestant]:
    """Ours and the peers that are here, ours first, each after its first step; nothing where no peer is here.

    Other people's are built before ours, which gets the parameters of the first of them.
    """
    contestants: list[Contestant] = []
    parameters = None
    for peer in sorted((*case.peers, case.ours), key=lambda peer: peer.kind == case.kind):
        if peer.name == OURS and not contestants:
            break
        options = peer.options | ({"path": request.nanogpt} if peer.kind == "nanogpt" else {})
        overrides = [*case.overrides, *peer.overrides, *request.overrides]
        sized = parameters if peer.kind == "ours" else None
        order = Order(kind=peer.kind, overrides=overrides, options=options, parameters=sized)
        contestant = Contestant("peers", peer.name, order, folder)
        contestant.build(request, stack)
        trouble = contestant.trouble
        say(f"{case.name}: {peer.name}: " + (_described(contestant.built) if trouble is None else str(trouble)))
        if trouble is not None and trouble.status == ABSENT:
            continue
        parameters = parameters or contestant.built.get("parameters")
        contestants.append(contestant)
    return sorted(contestants, key=lambda contestant: contestant.label != OURS)


def _described(built: dict[str, Any]) -> str:
    width = built["feed_forward_width"]
    sized = f", feed_forward_width {width}" if width is not None else ""
    return f"{built['parameters']:,} parameters{sized}, first step {built['first_step_seconds']:.1f} s"


def _turns(contestants: Sequence[Contestant], request: Request) -> Iterator[None]:
    """Ours, a peer, ours, a peer: whatever else the machine does hits all of them. Yields when each had its turn."""
    num_steps = {}
    for contestant in contestants:
        contestant.ask("time", num_steps=NUM_WARMUP)
        milliseconds = contestant.ask("time", num_steps=3).get("milliseconds", 1.0)
        num_steps[contestant.label] = max(3, min(MAX_STEPS, round(1e3 * request.seconds / milliseconds)))
    for _ in range(request.repeats):
        for contestant in contestants:
            answer = contestant.ask("time", num_steps=num_steps[contestant.label])
            contestant.milliseconds += answer.values()
        yield


def _measurements(case: Case, one: Contestant, contestants: Sequence[Contestant]) -> Iterator[Measurement]:
    """The rows of one implementation; of ours also how it compares."""
    peak_mib = one.ask("memory").get("peak_mib")
    batch = {"case": case.name, "batch_size": one.settings.train.batch_size}
    settings = batch | {"implementation": one.label}
    if one.trouble is not None:
        yield from without_numbers(UNITS, settings, one.trouble.status, one.trouble.reason)
    else:
        yield _row("tokens_per_second", one.speeds(), settings)
        if peak_mib is None:
            yield from without_numbers({"peak_memory_mib": "MiB"}, settings, "unsupported", NO_DEVICE_MEMORY)
        else:
            yield Measurement(metric="peak_memory_mib", value=peak_mib, unit="MiB", settings=settings)
        seconds = one.built["first_step_seconds"]
        yield Measurement(metric="first_step_seconds", value=seconds, unit="s", settings=settings, num_samples=1)
    for peer in contestants if one.label == OURS else ():
        if peer is one:
            continue
        settings, trouble = batch | {"peer": peer.label}, one.trouble or peer.trouble
        if trouble is not None:
            yield from without_numbers({"tokens_per_second_ratio": ""}, settings, trouble.status, trouble.reason)
        else:
            yield _row("tokens_per_second_ratio", speed_ratios(one.speeds(), peer.speeds()), settings)


def speed_ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Our tokens a second over the peer's, turn by turn, so that what slows a whole turn cancels."""
    return [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]


def _row(metric: str, values: Sequence[float], settings: dict[str, Any]) -> Measurement:
    """The median of all turns, from the smallest to the largest."""
    return Measurement(
        metric=metric,
        value=statistics.median(values),
        unit=UNITS.get(metric, ""),
        settings=settings,
        low=min(values),
        high=max(values),
        num_samples=len(values),
    )
