"""A plan as programs: generators that yield jobs and are sent their rows; a driver carries them out.

A program does not know how a job runs, or if it ran before. The driver runs each job once, however often it is
requested.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from attnbench.comparison.workers import Stack
from attnbench.machine.processes import Outcome
from attnbench.results.job import Job
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

Rows = list[ResultRow]
"""Rows of a finished run; those of a training that diverged say so."""


@dataclass(frozen=True)
class Failure:
    """The run left no results, or they cannot be read."""

    reason: str


@dataclass(frozen=True)
class Unknown:
    """Answer: the run is not finished, and this driver may not run it."""


Answer = Rows | Failure | Unknown
Program = Generator[list[Job], list[Answer], T]
"""A yield is one call: the runs that are needed next."""


class Undecided(Exception):  # noqa: N818
    """A program cannot continue, because a run has no rows."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"{job.label}: has no results, so no learning rate can be chosen")


Execute = Callable[[list[Stack], Callable[[], list[Stack]]], Generator[Outcome[Stack], None, None]]
"""Runs stacks and yields their outcomes; after each outcome the second argument returns further stacks to run."""


@dataclass
class Driver:
    """Runs several programs; each continues once its own runs are answered."""

    answers: dict[Path, Answer] = field(default_factory=dict)
    """Answers by the folder of the run."""
    rerun: bool = False
    """Finished runs are made again, once."""
    may_run: Callable[[Job], bool] = lambda job: False
    """False: the run is Unknown unless it is finished. A driver that may run nothing records the requested runs."""
    stacks: Callable[[list[Job]], list[Stack]] = lambda jobs: [(job,) for job in jobs]
    """Groups the runs of one call, including finished ones, so that a resumed plan has the same stacks."""
    before: Callable[[Job], None] = lambda job: None
    """Called before a run is looked for."""
    on_asked: Callable[[list[Job], list[Job]], None] = lambda asked, finished: None
    """Called with the runs that programs newly request, and with the finished ones among them."""
    asked: dict[Path, Job] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of failed runs, by label."""
    _going: list[tuple[Program[None], list[Job] | None]] = field(default_factory=list)
    """Programs and the call that each waits for; None before its first."""

    def run(self, programs: Iterable[Program[None]], execute: Execute | None = None) -> None:
        """Run programs to their ends.

        Args:
            execute: None if nothing may run.
        """
        self._going = [(program, None) for program in programs]
        while stacks := self.step():
            assert execute is not None, "something may run"
            with closing(execute(stacks, self.step)) as outcomes:
                for outcome in outcomes:
                    self._take(outcome)

    def step(self) -> list[Stack]:
        """Advance the programs as far as answers allow; return the requested runs that have to run."""
        going, self._going, stacks, asked = self._going, [], [], []
        for program, call in going:
            while call is None or all(job.folder in self.answers for job in call):
                try:
                    answered = [self.answers[job.folder] for job in call or ()]
                    call = next(program) if call is None else program.send(answered)
                except StopIteration:
                    break
                new = [job for job in call if job.folder not in self.asked]
                self.asked |= {job.folder: job for job in new}
                asked += new
                for job in new:
                    if job.folder not in self.answers and (answer := self._known(job)) is not None:
                        self.answers[job.folder] = answer
                        if isinstance(answer, Failure) and self.may_run(job):
                            log.error(f"failed: {job.label}: {answer.reason}")
                            self.failures[job.label] = answer.reason
                if any(job.folder not in self.answers for job in new):
                    stacks += self.stacks(new)
            else:
                self._going.append((program, call))
        self.on_asked(asked, [job for job in asked if job.folder in self.answers])
        left = (tuple(job for job in stack if job.folder not in self.answers) for stack in stacks)
        return [stack for stack in left if stack]

    def _known(self, job: Job) -> Answer | None:
        """Return the answer if the run need not run."""
        self.before(job)
        may_run = self.may_run(job)
        if not job.is_done() or (self.rerun and may_run):
            return None if may_run else Unknown()
        return read_or_failure(job.all_results)

    def _take(self, outcome: Outcome[Stack]) -> None:
        for job in outcome.item:
            answer = Failure(outcome.error or f"it left no {job.results.name}")
            # After a failed rerun the results may be those of an earlier run.
            if job.is_done() and (outcome.error is None or not self.rerun):
                answer = read_or_failure(job.all_results)
            self.answers[job.folder] = answer
            if isinstance(answer, Failure):
                self.failures[job.label] = answer.reason


def read_or_failure(paths: Iterable[Path]) -> Rows | Failure:
    """A Failure names the remedy for an altered file."""
    try:
        return [row for path in paths for row in read_results(path)]
    except UserError as error:
        return Failure(str(error))


def ask_for(jobs: Sequence[Job]) -> Program[None]:
    """Ask for runs in one call."""
    if jobs:
        yield list(jobs)
