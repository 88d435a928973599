"""One task of an array job, on its node, where it runs as in a local comparison."""

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.comparison.workers import Stack, run_here
from attnbench.machine.environment import machine
from attnbench.machine.processes import Outcome
from attnbench.machine.signals import interruptible
from attnbench.results.files import read_json_lines, replace_file
from attnbench.results.folder import ROOT
from attnbench.results.job import Job
from attnbench.settings.errors import Interrupted
from attnbench.settings.registry import trust
from attnbench.settings.schema import ComparisonSettings
from attnbench.settings.untrusted import MAX_JSON_BYTES, read_bounded

TIMED_HOST = "timed_host"
"""File of .slurm/ with the node of the timed runs."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Cells of one task; submitit pickles it and calls it on the node."""

    settings: ComparisonSettings
    stacks: Sequence[Stack]
    is_timed: bool
    outcomes: Path
    """Prefix of the files with a line per run, one file for each start of the task."""
    machine: dict[str, Any]
    """Environment in the identity of the timed runs."""
    trusted: frozenset[str]

    def __call__(self) -> None:
        """Make the unfinished runs; asked to end, keep their state and wait: a preempted task is not finished."""
        trust(self.trusted)
        try:
            with interruptible("asked to end; what is finished is kept"):
                self._run()
        except Interrupted:
            while True:
                signal.pause()

    def _run(self) -> None:
        ran = {record["cell"] for record in outcomes_of(self.outcomes)} if self.settings.rerun else set()
        todo = [
            tuple(cell for cell in stack if (name_of(cell) not in ran if self.settings.rerun else not cell.is_done()))
            for stack in self.stacks
        ]
        todo = [stack for stack in todo if stack]
        reason = self._why_not() if self.is_timed and todo else None
        if reason is not None:
            for stack in todo:
                self._keep(Outcome(item=stack, seconds=0.0, error=reason))
            return
        output = self.outcomes.with_name(f"{self.outcomes.name}.log")
        number = sum(map(len, todo))
        with closing(run_here(self.settings, todo, is_timed=self.is_timed, log=output, number=number)) as outcomes:
            for outcome in outcomes:
                self._keep(outcome)

    def _why_not(self) -> str | None:
        """Return why timed runs cannot run on this node."""
        now = machine_of(self.stacks[0][0])
        changed = [
            f"{name} {self.machine.get(name)} is {now.get(name)} there"
            for name in {**self.machine, **now}
            if self.machine.get(name) != now.get(name)
        ]
        if changed:
            return f"{node_name()} is not the machine that the plan was made on: {'; '.join(changed)}"
        return different_host(self.outcomes.parent, keeps=True)

    def _keep(self, outcome: Outcome[Stack]) -> None:
        # One file per start of the task: a torn line spoils no other.
        path = self.outcomes.with_name(f"{self.outcomes.name}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.jsonl")
        with path.open("a", encoding="utf-8") as file:
            for cell in outcome.item:
                record = {"cell": name_of(cell), "seconds": outcome.seconds / len(outcome.item)}
                file.write(json.dumps({**record, "error": outcome.error, "host": node_name()}) + "\n")

    def checkpoint(self) -> Any:
        """Return the call for the next start of the task; submitit asks before its time is up."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def machine_of(cell: Job) -> dict[str, Any]:
    """Identity of this machine for a timed run."""
    return machine(cell.device, ROOT)


def node_name() -> str:
    """Name of this host in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def different_host(folder: Path, *, keeps: bool = False, anew: bool = False) -> str | None:
    """Return why this host may not measure timed runs of a plan, whose .slurm is `folder`. `keeps` records this host if
    there is none; `anew`: all timed runs are measured again."""
    path = folder / TIMED_HOST
    if anew:
        path.unlink(missing_ok=True)
    if not path.exists():
        if keeps:
            replace_file(path, node_name())
        return None
    host = read_bounded(path, MAX_JSON_BYTES).strip()
    if host == node_name():
        return None
    return (
        f"timed runs were started on {host}, and this host is {node_name()}: timings from two hosts cannot share a "
        "table; the same command with rerun=true measures all of them here"
    )


def name_of(cell: Job) -> str:
    return "/".join(cell.results.parts[-4:])


def outcomes_of(beginning: Path) -> list[dict[str, Any]]:
    """Read the outcomes of a task, as far as they are written."""
    paths = sorted(beginning.parent.glob(f"{beginning.name}.*.jsonl"))
    return [record for path in paths for record in read_json_lines(path).objects]
