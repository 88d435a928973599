"""Contestants: implementations in processes of their own, their answers and their rows.

outputs/peers/<case>/ first-step/ agreement/
  case.json  environment-<id>.json  output.log  results/<evaluation>-<hash>.jsonl
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnbench.cli.compose import compose
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import environment, environment_id
from attnbench.results.files import replace_file
from attnbench.results.folder import ROOT
from attnbench.results.identity import config_hash
from attnbench.results.job import Job, results_of
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from benchmarks.peers.cases import CASES
from benchmarks.peers.steps import Order
from benchmarks.peers.worker import LIMIT_SECONDS, Worker, WorkerError

OUR_KINDS, FLA_KINDS = ("ours", "chunked_delta_rule"), ("fla", "naive_delta_rule")
"""Kinds of an order that are ours, and that flash-linear-attention's packages are for."""

CACHES = "attnbench-caches-"
"""Beginning of the names of temporary folders for compilers."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """The command line."""

    overrides: Sequence[str] = ()
    """Settings of train.py that win over those of the cases."""
    cases: Sequence[str] | None = None
    """Names; None for all that are meant for the device."""
    mixers: Sequence[str] | None = None
    """Mixers of first steps and agreement; None for all of conf/attn."""
    nanogpt: str | None = None
    """Path of nanoGPT's model.py."""
    fla: Sequence[str] = ()
    """Folders that come first on the PYTHONPATH of flash-linear-attention's processes."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of all peers, not of ours."""
    repeats: int = 5
    """Turns of each implementation."""
    seconds: float = 1.0
    """Approximate time of one turn; at least three steps."""
    limit_seconds: float = LIMIT_SECONDS
    """Longest wait for an answer of one."""
    first_step: bool = False
    agreement_steps: int | None = None
    outputs: Path = Path("outputs/peers")
    command: str = ""

    def check(self) -> None:
        """Raises UserError for what cannot be asked for."""
        unknown = [name for name in self.cases or () if name not in CASES]
        if unknown:
            raise UserError(f"--cases {' '.join(unknown)}: unknown; there is {', '.join(CASES)}")
        for option, value in (("repeats", self.repeats), ("agreement", self.agreement_steps)):
            least = 2 if option == "agreement" else 1
            if value is not None and value < least:
                raise UserError(f"--{option} {value}: must be at least {least}")
        for option, value in (("seconds", self.seconds), ("limit", self.limit_seconds)):
            if not value > 0:
                raise UserError(f"--{option} {value:g}: must be above 0")


class Contestant(Job):
    """One implementation: its process, what it answered, and its rows."""

    experiment = "peers"

    def __init__(self, evaluation: str, name: str, order: Order, folder: Path) -> None:
        self.evaluation, self.label, self.order, self.folder = evaluation, name, order, folder
        self.settings = compose(order.overrides)
        self.device = resolve_device(self.settings.device)
        self.worker: Worker | None = None
        self.built: dict[str, Any] = {}
        self.trouble: WorkerError | None = None
        """The error that it could not go on after."""
        self.milliseconds: list[float] = []
        """A step, one number a turn."""
        self.measured: Sequence[Measurement] = ()

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Return the worker's answer; empty after something went wrong, which `trouble` then says."""
        if self.trouble is not None or self.worker is None:
            return {}
        try:
            return self.worker.ask(question, **arguments)
        except WorkerError as error:
            self.trouble = error
            return {}

    def build(self, request: Request, stack: ExitStack, caches: Path | None = None) -> None:
        """Build in a new process, up to the end of the first step.

        Args:
            stack: ends the process.
            caches: of the compilers; None for empty ones.
        """
        if caches is None:
            caches = Path(stack.enter_context(TemporaryDirectory(prefix=CACHES, ignore_cleanup_errors=True)))
        kind = self.order.kind
        worker = Worker(
            self.folder / "output.log",
            caches,
            paths=request.fla if kind in FLA_KINDS else (),
            variables={} if kind in OUR_KINDS else request.variables,
            limit_seconds=request.limit_seconds,
        )
        self.worker, self.trouble = stack.enter_context(worker), None
        self.built = self.ask("build", order=asdict(self.order))

    def speeds(self) -> list[float]:
        """Return tokens a second, a number a turn."""
        tokens = self.settings.train.batch_size * self.settings.seq_len
        return [1e3 * tokens / milliseconds for milliseconds in self.milliseconds]

    def keep(self, measured: Sequence[Measurement]) -> None:
        """Write its rows anew."""
        # A process that died before it could say where it ran was started from here.
        self.built.setdefault("environment", environment(self.device, ROOT))
        self.measured = measured
        # The same order may stand for two mixers, as softmax's reference does for flash's.
        mixer = measured[0].settings.get("attn", "")
        self.config_hash = config_hash(
            [self.evaluation, self.label, mixer, asdict(self.order), environment_id(self.built["environment"])]
        )
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        with results_of(self) as writer:
            for measurement in self.rows():
                self.write(writer, measurement)

    def begin(self) -> dict[str, Any]:
        stamp = self.built["environment"]
        replace_file(self.folder / f"environment-{environment_id(stamp)}.json", json.dumps(stamp, indent=2) + "\n")
        return stamp

    def rows(self) -> Iterator[Measurement]:
        yield from self.measured

    def columns(self) -> dict[str, Any]:
        kind, precision = self.order.kind, self.settings.train.precision
        given = {"mixer": kind, "backend": kind, "precision": precision, "parameters": None, "corpus": None}
        return {
            **{name: self.built.get(name, value) for name, value in given.items()},
            "variant": self.label,
            "model": self.settings.model.name,
            "seq_len": self.settings.seq_len,
            "seed": self.settings.seed,
        }


def start_anew(folder: Path, name: str, request: Request, title: str) -> None:
    """Remove the rows that are there, and note the title and the command of those to come."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": name, "title": title, "command": request.command}
    replace_file(folder / "case.json", json.dumps(record, indent=1) + "\n")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
