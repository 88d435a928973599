"""How long a training takes to start: to the end of its first step, with empty compiler caches and with filled ones.

outputs/peers/first-step/
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from attnbench.results.files import replace_file
from attnbench.results.rows import Measurement
from benchmarks.peers.implementations import Job
from benchmarks.peers.rows import write_rows
from benchmarks.peers.turns import Compose, Say
from benchmarks.peers.worker import Worker, WorkerError

METRICS = ("start_seconds", "first_step_seconds")
"""From a configuration with all imports done, which reads the corpus and builds the model; and the step alone."""


def run_first_steps(
    mixers: Sequence[str],
    compose: Compose,
    overrides: Sequence[str],
    folder: Path,
    *,
    limit_seconds: float,
    command: str,
    say: Say,
) -> None:
    """Each mixer in a new process with caches that are empty, then in another with those that the first has left."""
    shutil.rmtree(folder, ignore_errors=True)
    for mixer in mixers:
        job = Job.of(compose([f"attn={mixer}", "data.vocabulary_size=1015", *overrides]), "ours", {})
        with TemporaryDirectory(prefix="attnbench-caches-", ignore_cleanup_errors=True) as caches:
            measured, built = [], {}
            for cache in ("cold", "warm"):
                settings = {"cache": cache, "attn": mixer, "batch_size": job.train.batch_size}
                try:
                    log = folder / "output.log"
                    with Worker(log, caches=Path(caches), limit_seconds=limit_seconds) as worker:
                        built = worker.ask("build", job=job.to_dict())
                except WorkerError as error:
                    say(f"{mixer}, {cache}: {error.status}: {error.reason}")
                    measured += [_lost(metric, settings, error) for metric in METRICS]
                    continue
                say(f"{mixer}, {cache}: " + ", ".join(f"{name} {built[name]:.2f}" for name in METRICS))
                measured += [
                    Measurement(metric=name, value=built[name], unit="s", settings=settings, num_samples=1)
                    for name in METRICS
                ]
        write_rows(folder, "first_step", mixer, job, built, measured)
    replace_file(folder / "case.json", json.dumps({"name": "first-step", "command": command}, indent=1) + "\n")


def _lost(metric: str, settings: dict[str, str], error: WorkerError) -> Measurement:
    return Measurement(metric=metric, value=None, unit="s", settings=settings, status=error.status, reason=error.reason)
