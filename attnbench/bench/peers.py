"""Our training step beside other people's: each in a process of its own, one at a time, taking turns.

outputs/peers/<case>/
  case.json  environment-<id>.json  output.log  results/peers-<hash>.jsonl
"""

import json
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.bench.cases import Case, Peer
from attnbench.bench.implementations import Job
from attnbench.bench.worker import ABSENT, Worker, WorkerError
from attnbench.folder import ROOT
from attnbench.jsonlines import replace_file
from attnbench.prepare import config_hash, measured_by
from attnbench.results import Identity, Measurement, ResultsWriter
from attnbench.runtime import environment, environment_id, resolve_device
from attnbench.settings import RunSettings

OURS = "attnbench"
NO_DEVICE_MEMORY = "reserved memory is counted on CUDA devices alone"
NUM_WARMUP = 6
"""Steps after the first: a captured step is recorded in the fourth."""

Compose = Callable[[list[str]], RunSettings]
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True, frozen=True)
class Places:
    """Where peers are found."""

    nanogpt: str | None = None
    """Its model.py."""
    fla: tuple[str, ...] = ()
    """Folders that come first on the PYTHONPATH of flash-linear-attention's processes."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment of all peers, not of ours."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Repetition:
    """How often steps are timed."""

    repeats: int
    """Turns of each implementation."""
    seconds: float
    """Of one turn, about; at least three steps."""
    max_steps: int = 1000


class Spread(NamedTuple):
    """A median, and the smallest and largest of what it is the median of."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True, kw_only=True)
class Contestant:
    """One implementation of a case, and what is known of it."""

    name: str
    job: Job
    worker: Worker
    built: dict[str, Any] = field(default_factory=dict)
    """What it answered when it was built."""
    milliseconds: list[float] = field(default_factory=list)
    """A step, one number a turn."""
    peak_mib: float | None = None
    trouble: WorkerError | None = None
    """Why it could not go on."""

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer; empty after something went wrong, which `trouble` then says."""
        if self.trouble is not None:
            return {}
        try:
            return self.worker.ask(what, **arguments)
        except WorkerError as error:
            self.trouble = error
            return {}

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.job.train.batch_size * self.job.seq_len

    def speeds(self) -> list[float]:
        """Tokens a second, a number a turn."""
        return [1e3 * self.tokens / milliseconds for milliseconds in self.milliseconds]


def run_case(
    case: Case,
    compose: Compose,
    overrides: Sequence[str],
    folder: Path,
    *,
    places: Places,
    repetition: Repetition,
    command: str,
    say: Say,
) -> bool:
    """Measures one case into `folder`, replacing what is there; False where no peer is present, which it says.

    Args:
        compose: a command line of train.py to its settings.
        overrides: the user's, which win over the case's.
        command: what was typed, for the record.

    Raises:
        UserError: settings that cannot be.
    """
    with ExitStack() as stack:
        contestants = _built(case, compose, overrides, folder, places, stack, say)
        if not contestants:
            say(f"{case.name}: skipped, no peer is here")
            return False
        _take_turns(contestants, repetition)
        for contestant in contestants:
            contestant.peak_mib = contestant.ask("memory").get("peak_mib")
    shutil.rmtree(folder / "results", ignore_errors=True)
    for contestant in contestants:
        measurements = list(_measurements(case, contestant, contestants))
        write_rows(folder, "peers", contestant.name, contestant.job, contestant.built, measurements)
    record = {"name": case.name, "title": _title(case, contestants[0].job), "command": command}
    replace_file(folder / "case.json", json.dumps(record, indent=1) + "\n")
    return True


def _title(case: Case, job: Job) -> str:
    """What was really run, whatever the case's name says."""
    tokens = f"{job.train.batch_size} × {job.seq_len:,} tokens"
    if case.kind != "ours":
        heads, width = job.options["shape"][2:]
        return f"{case.kind.replace('_', ' ')}, forward and backward, {tokens}, {heads} heads of {width}"
    return f"{job.mixer.name}, {tokens}, {job.model.num_layers} layers of {job.model.dim}"


def write_rows(
    folder: Path, evaluation: str, name: str, job: Job, built: dict[str, Any], measurements: Iterable[Measurement]
) -> None:
    """One implementation's results file, and the environment that it was measured in.

    Args:
        name: the rows' variant.
        built: the worker's answer; empty where there was none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # What died before it could say where it ran was started from here.
    stamp = built.get("environment") or environment(resolve_device(job.device), ROOT)
    replace_file(folder / f"environment-{environment_id(stamp)}.json", json.dumps(stamp, indent=2) + "\n")
    hashed = config_hash([evaluation, name, job.to_dict(), environment_id(stamp)])
    identity = Identity(
        experiment="peers",
        run=folder.name,
        mixer=built.get("mixer", job.kind),
        variant=name,
        backend=built.get("backend", job.kind),
        model=job.model.name,
        parameters=built.get("parameters"),
        seq_len=job.seq_len,
        evaluation=evaluation,
        seed=job.seed,
        precision=built.get("precision", job.train.precision),
        corpus=built.get("corpus"),
        config_hash=hashed,
        **measured_by(stamp),
    )
    with ResultsWriter(folder / "results" / f"{evaluation}-{hashed}.jsonl", identity) as writer:
        for measurement in measurements:
            writer.write(measurement)


def _built(
    case: Case,
    compose: Compose,
    overrides: Sequence[str],
    folder: Path,
    places: Places,
    stack: ExitStack,
    say: Say,
) -> list[Contestant]:
    """Ours and the peers that are here, ours first, each after its first step; nothing where no peer is here.

    Other people's are built before ours, which gets the parameters of the first of them.
    """
    log = folder / "output.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    ours = Peer(name=OURS, kind=case.kind, options=case.options)
    found: list[Contestant] = []
    parameters = None
    for peer in sorted((*case.peers, ours), key=lambda peer: peer.kind == case.kind):
        if peer is ours and not found:
            break
        settings = compose([*case.overrides, *peer.overrides, *overrides])
        contestant = _started(peer, settings, parameters, log, places, stack, is_ours=peer.kind == case.kind)
        if contestant.trouble is not None:
            say(f"{case.name}: {peer.name}: {contestant.trouble.status}: {contestant.trouble.reason}")
            if contestant.trouble.status == ABSENT:
                continue
        else:
            say(f"{case.name}: {peer.name}: {_described(contestant.built)}")
        parameters = parameters or contestant.built.get("parameters")
        found.append(contestant)
    return sorted(found, key=lambda contestant: contestant.name != OURS)


def _started(
    peer: Peer,
    settings: RunSettings,
    parameters: int | None,
    log: Path,
    places: Places,
    stack: ExitStack,
    *,
    is_ours: bool,
) -> Contestant:
    """One implementation, built in its own process, after its first step."""
    options = {**peer.options, "path": places.nanogpt} if peer.kind == "nanogpt" else peer.options
    job = Job.of(settings, peer.kind, options, parameters if peer.kind == "ours" else None)
    paths = places.fla if peer.kind in ("fla", "naive_delta_rule") else ()
    worker = stack.enter_context(Worker(log, paths=paths, variables={} if is_ours else places.variables))
    contestant = Contestant(name=peer.name, job=job, worker=worker)
    contestant.built = contestant.ask("build", job=job.to_dict())
    return contestant


def _described(built: dict[str, Any]) -> str:
    width = built["feed_forward_width"]
    sized = f", feed_forward_width {width}" if width is not None else ""
    return f"{built['parameters']:,} parameters{sized}, first step {built['first_step_seconds']:.1f} s"


def _take_turns(contestants: Sequence[Contestant], repetition: Repetition) -> None:
    """Ours, a peer, ours, a peer: whatever else the machine does hits all of them."""
    num_steps = {}
    for contestant in contestants:
        contestant.ask("time", num_steps=NUM_WARMUP)
        milliseconds = contestant.ask("time", num_steps=3).get("milliseconds", 1.0)
        num_steps[contestant.name] = max(3, min(repetition.max_steps, round(1e3 * repetition.seconds / milliseconds)))
    for _ in range(repetition.repeats):
        for contestant in contestants:
            answer = contestant.ask("time", num_steps=num_steps[contestant.name])
            contestant.milliseconds += answer.values()


def _measurements(case: Case, own: Contestant, contestants: Sequence[Contestant]) -> Iterator[Measurement]:
    """The rows of one implementation; of ours also how it compares."""
    settings = {"case": case.name, "implementation": own.name, "batch_size": own.job.train.batch_size}
    if own.trouble is not None:
        metrics = {"tokens_per_second": "tokens/s", "peak_memory_mib": "MiB", "first_step_seconds": "s"}
        for metric, unit in metrics.items():
            yield _without_number(metric, unit, settings, own.trouble)
    else:
        speed = Spread.of(own.speeds())
        yield _row("tokens_per_second", "tokens/s", settings, speed, len(own.milliseconds))
        yield Measurement(
            metric="peak_memory_mib",
            value=own.peak_mib,
            unit="MiB",
            settings=settings,
            status="unsupported" if own.peak_mib is None else "ok",
            reason=NO_DEVICE_MEMORY if own.peak_mib is None else "",
        )
        first = own.built["first_step_seconds"]
        yield Measurement(metric="first_step_seconds", value=first, unit="s", settings=settings, num_samples=1)
    if own.name == OURS:
        yield from (_ratio(case, own, peer) for peer in contestants if peer is not own)


def _ratio(case: Case, ours: Contestant, peer: Contestant) -> Measurement:
    settings = {"case": case.name, "peer": peer.name, "batch_size": ours.job.train.batch_size}
    trouble = ours.trouble or peer.trouble
    if trouble is not None:
        return _without_number("tokens_per_second_ratio", "", settings, trouble)
    spread = speed_ratio(ours.speeds(), peer.speeds())
    return _row("tokens_per_second_ratio", "", settings, spread, len(ours.milliseconds))


def speed_ratio(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Our tokens a second over the peer's, turn by turn, so that what slows a whole turn cancels."""
    return Spread.of([mine / theirs for mine, theirs in zip(ours, peer, strict=True)])


def _row(metric: str, unit: str, settings: dict[str, Any], spread: Spread, num_samples: int) -> Measurement:
    return Measurement(
        metric=metric,
        value=spread.median,
        unit=unit,
        settings=settings,
        low=spread.low,
        high=spread.high,
        num_samples=num_samples,
    )


def _without_number(metric: str, unit: str, settings: dict[str, Any], trouble: WorkerError) -> Measurement:
    return Measurement(
        metric=metric, value=None, unit=unit, settings=settings, status=trouble.status, reason=trouble.reason
    )
