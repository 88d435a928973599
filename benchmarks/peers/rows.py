"""An implementation of a case, and its rows: speed, memory, first step, and how ours compares."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.machine.device import resolve_device
from attnbench.machine.environment import environment, environment_id
from attnbench.results.files import replace_file
from attnbench.results.folder import ROOT
from attnbench.results.identity import config_hash
from attnbench.results.job import measured_by
from attnbench.results.rows import Identity, Measurement, ResultsWriter
from benchmarks.peers.cases import Case
from benchmarks.peers.implementations import Job
from benchmarks.peers.worker import Worker, WorkerError

OURS = "attnbench"
NO_DEVICE_MEMORY = "reserved memory is counted on CUDA devices alone"


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


def measurements_of(case: Case, own: Contestant, contestants: Sequence[Contestant]) -> Iterator[Measurement]:
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


def write_rows(
    folder: Path, evaluation: str, name: str, job: Job, built: dict[str, Any], measurements: Sequence[Measurement]
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
    # The same job may stand for two mixers, as softmax's reference does for flash's.
    whose = measurements[0].settings.get("attn", "")
    hashed = config_hash([evaluation, name, whose, job.to_dict(), environment_id(stamp)])
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
