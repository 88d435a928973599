"""Our training step beside other people's: each in a process of its own, one at a time, taking turns.

outputs/peers/<case>/
  case.json  environment-<id>.json  output.log  results/peers-<hash>.jsonl
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.results.files import replace_file
from attnbench.settings.schema import RunSettings
from attnbench.settings.text import unlinked
from benchmarks.peers.cases import Case, Peer
from benchmarks.peers.implementations import Job
from benchmarks.peers.rows import OURS, Contestant, measurements_of, write_rows
from benchmarks.peers.worker import ABSENT, LIMIT_SECONDS, Worker

NUM_WARMUP = 6
"""Steps after the first: a captured step is recorded in the fourth."""

Compose = Callable[[list[str]], RunSettings]
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True, frozen=True)
class Places:
    """Where peers are found, and how long one may take."""

    nanogpt: str | None = None
    """Its model.py."""
    fla: tuple[str, ...] = ()
    """Folders that come first on the PYTHONPATH of flash-linear-attention's processes."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment of all peers, not of ours."""
    limit_seconds: float = LIMIT_SECONDS
    """Longest wait for an answer of one."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Repetition:
    """How often steps are timed."""

    repeats: int
    """Turns of each implementation."""
    seconds: float
    """Of one turn, about; at least three steps."""
    max_steps: int = 1000


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
        shutil.rmtree(folder / "results", ignore_errors=True)
        record = {"name": case.name, "title": _title(case, contestants[0].job), "command": command}
        replace_file(folder / "case.json", json.dumps(record, indent=1) + "\n")
        for _ in _turns(contestants, repetition):
            # After each: what takes minutes to start should not be lost with the turns that are missing.
            for contestant in contestants:
                contestant.peak_mib = contestant.ask("memory").get("peak_mib")
                measurements = list(measurements_of(case, contestant, contestants))
                write_rows(folder, "peers", contestant.name, contestant.job, contestant.built, measurements)
    return True


def _title(case: Case, job: Job) -> str:
    """What was really run, whatever the case's name says."""
    tokens = f"{job.train.batch_size} × {job.seq_len:,} tokens"
    if case.kind != "ours":
        heads, width = job.options["shape"][2:]
        return f"{case.kind.replace('_', ' ')}, forward and backward, {tokens}, {heads} heads of {width}"
    return f"{job.mixer.name}, {tokens}, {job.model.num_layers} layers of {job.model.dim}"


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
    unlinked(log).write_text("")
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
    variables = {} if is_ours else places.variables
    worker = stack.enter_context(Worker(log, paths=paths, variables=variables, limit_seconds=places.limit_seconds))
    contestant = Contestant(name=peer.name, job=job, worker=worker)
    contestant.built = contestant.ask("build", job=job.to_dict())
    return contestant


def _described(built: dict[str, Any]) -> str:
    width = built["feed_forward_width"]
    sized = f", feed_forward_width {width}" if width is not None else ""
    return f"{built['parameters']:,} parameters{sized}, first step {built['first_step_seconds']:.1f} s"


def _turns(contestants: Sequence[Contestant], repetition: Repetition) -> Iterator[None]:
    """Ours, a peer, ours, a peer: whatever else the machine does hits all of them. Yields when each had its turn."""
    num_steps = {}
    for contestant in contestants:
        contestant.ask("time", num_steps=NUM_WARMUP)
        milliseconds = contestant.ask("time", num_steps=3).get("milliseconds", 1.0)
        num_steps[contestant.name] = max(3, min(repetition.max_steps, round(1e3 * repetition.seconds / milliseconds)))
    for _ in range(repetition.repeats):
        for contestant in contestants:
            answer = contestant.ask("time", num_steps=num_steps[contestant.name])
            contestant.milliseconds += answer.values()
        yield
