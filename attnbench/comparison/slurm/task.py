"""Work of one task of an array job, on its node: the cells that it was given, as a local comparison runs them."""

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.comparison.cells import Cell, run_here
from attnbench.machine.environment import machine
from attnbench.machine.processes import Outcome
from attnbench.machine.signals import interruptible
from attnbench.results.files import read_json_lines, replace_file
from attnbench.results.folder import ROOT
from attnbench.settings.errors import Interrupted
from attnbench.settings.registry import trust
from attnbench.settings.schema import ComparisonSettings
from attnbench.settings.text import MAX_JSON_BYTES, read_bounded

TIMED_HOST = "timed_host"
"""File of .slurm/ with the node that what is timed was measured on."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Cells of one task: what submitit pickles, and calls on the node."""

    settings: ComparisonSettings
    stacks: Sequence[tuple[Cell, ...]]
    is_timed: bool
    outcomes: Path
    """Beginning of the file that gets a line a cell, one for each time that the task begins."""
    machine: dict[str, Any]
    """Environment that the plan's timed cells are named by."""
    trusted: frozenset[str]

    def __call__(self) -> None:
        """Run those that are not done, as a local comparison does; asked to end, keep what they have, and wait for the
        end: a task that is preempted must not look as if it had finished."""
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
        """Return why what is timed cannot be measured on this node, or None: one machine, one host, a table."""
        now = machine_of(self.stacks[0][0])
        changed = [
            f"{name} {self.machine.get(name)} is {now.get(name)} there"
            for name in {**self.machine, **now}
            if self.machine.get(name) != now.get(name)
        ]
        if changed:
            return f"{node_name()} is not the machine that the plan was made on: {'; '.join(changed)}"
        return different_host(self.outcomes.parent, keeps=True)

    def _keep(self, outcome: Outcome[tuple[Cell, ...]]) -> None:
        # Of each beginning: one that was cut off inside a line, or that another host goes on with, spoils no other.
        path = self.outcomes.with_name(f"{self.outcomes.name}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.jsonl")
        with path.open("a", encoding="utf-8") as file:
            for cell in outcome.item:
                record = {"cell": name_of(cell), "seconds": outcome.seconds / len(outcome.item)}
                file.write(json.dumps({**record, "error": outcome.error, "host": node_name()}) + "\n")

    def checkpoint(self) -> Any:
        """Return what is called when the task begins again; submitit asks before its time is up."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def machine_of(cell: Cell) -> dict[str, Any]:
    """Return what identifies the machine that a timed cell runs on, on this host."""
    return machine(cell.jobs[0].device, ROOT)


def node_name() -> str:
    """Return the name of this host, as Slurm has it inside a task."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def different_host(folder: Path, *, keeps: bool = False, anew: bool = False) -> str | None:
    """Return the reason why this host may not measure what is timed of a plan; None: nobody has on a cluster, or it.

    Args:
        folder: .slurm in the plan's.
        keeps: this host is the one, where there was none.
        anew: all of it is measured again.
    """
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
        f"what is timed was begun on {host}, and this is {node_name()}: rows of two hosts are no table; "
        "the same command with rerun=true measures all of it again"
    )


def name_of(cell: Cell) -> str:
    """Name a cell by its first results file."""
    return "/".join(cell.results[0].parts[-4:])


def outcomes_of(beginning: Path) -> list[dict[str, Any]]:
    """Read the outcomes of a task, as far as they are written."""
    paths = sorted(beginning.parent.glob(f"{beginning.name}.*.jsonl"))
    return [record for path in paths for record in read_json_lines(path).objects]
