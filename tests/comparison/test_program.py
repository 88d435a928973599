"""Programs under the driver: each goes on as its own runs are answered, each run is made once, and none is invented."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attnbench.comparison import program
from attnbench.comparison.program import Driver, Failure, Program, Undecided, Unknown
from attnbench.machine.processes import Outcome


@dataclass(eq=False)
class Run:
    """Stands in for a cell."""

    label: str
    done: set[str]

    @property
    def folder(self) -> Path:
        return Path(self.label)

    @property
    def results(self) -> Path:
        return Path(self.label)

    @property
    def all_results(self) -> list[Path]:
        return [self.results]

    def is_done(self) -> bool:
        return self.label in self.done


@pytest.fixture(autouse=True)
def read(monkeypatch):
    """Return the answer to each run; results that were read, by name."""
    names = []
    monkeypatch.setattr(program, "read_or_failure", lambda paths: [names.append(str(path)) or path for path in paths])
    return names


@dataclass
class Followed:
    """Two programs of three steps each under a driver, and the order in which their runs are made."""

    done: set[str] = field(default_factory=set)
    failing: tuple[str, ...] = ()
    order: list[str] = field(default_factory=list)
    """Which of the runs that wait is over next; the others in the order in which they wait."""

    def steps(self, name: str) -> Program[None]:
        for step in ("1", "2", "3"):
            run: Any = Run(f"{name}{step}", self.done)
            [answer] = yield [run]
            if isinstance(answer, Failure | Unknown):
                assert str(Undecided(run)).startswith(f"{name}{step}: has no results")
                return

    def execute(self, stacks, more):
        waiting = list(stacks)
        while waiting:
            stack = next((it for name in self.order for it in waiting if it[0].label == name), waiting[0])
            waiting.remove(stack)
            label = stack[0].label
            self.made.append(label)
            self.done |= {label} - {*self.failing}
            yield Outcome(item=stack, seconds=1.0, error="boom" if label in self.failing else None)
            waiting = more() + waiting

    def run(self, **given) -> list[str]:
        self.made, self.driver = [], Driver(**{"may_run": lambda run: True, **given})
        self.driver.run([self.steps("a"), self.steps("b")], self.execute)
        return self.made


def test_a_program_goes_on_while_another_still_waits():
    assert Followed(order=["a1", "a2", "a3"]).run() == ["a1", "a2", "a3", "b1", "b2", "b3"]
    assert Followed(order=["b1", "a1", "b2", "a2"]).run() == ["b1", "a1", "b2", "a2", "a3", "b3"]


def test_finished_runs_are_read_once_and_what_they_make_known_is_asked_for(read):
    asked = []
    followed = Followed(done={"a1", "a2", "b1"})
    assert followed.run(on_asked=lambda new, finished: asked.append((len(new), len(finished)))) == ["a3", "b2", "b3"]
    assert asked[0] == (5, 3)
    assert sorted(read) == sorted(["a1", "a2", "b1", "a3", "b2", "b3"])
    before = len(read)
    followed.driver.run([followed.steps("a"), followed.steps("b")])
    assert len(read) == before


def test_run_again_every_run_is_made_once_and_a_failed_one_is_no_former_result():
    every = {f"{name}{step}" for name in "ab" for step in "123"}
    followed = Followed(done=set(every), failing=("b1",))
    assert followed.run(rerun=True) == ["a1", "a2", "a3", "b1"]
    assert followed.driver.failures == {"b1": "boom"}


def test_a_program_with_a_failed_run_asks_for_nothing_more():
    followed = Followed(failing=("a1",))
    assert followed.run() == ["a1", "b1", "b2", "b3"]
    assert followed.driver.failures == {"a1": "boom"}


def test_runs_that_may_not_run_are_unknown_unless_they_are_finished():
    followed = Followed(done={"a1", "a2"})
    assert followed.run(may_run=lambda run: run.label.startswith("b")) == ["b1", "b2", "b3"]
    assert isinstance(followed.driver.answers[Path("a3")], Unknown)


def test_a_driver_that_runs_nothing_records_what_is_asked_for():
    followed = Followed(done={"a1"})
    assert followed.run(may_run=lambda run: False) == []
    assert [run.label for run in followed.driver.asked.values()] == ["a1", "a2", "b1"]


def test_stacks_are_those_of_the_whole_call_without_its_finished_runs():
    done, stacked = {"1", "3"}, []
    runs: list[Any] = [Run(str(number), done) for number in range(5)]

    def call():
        yield runs

    def execute(stacks, more):
        stacked.extend([[run.label for run in stack] for stack in stacks])
        for stack in stacks:
            done.update(run.label for run in stack)
            yield Outcome(item=stack, seconds=1.0, error=None)

    driver = Driver(may_run=lambda run: True, stacks=lambda runs: [tuple(runs[:2]), tuple(runs[2:4]), tuple(runs[4:])])
    driver.run([call()], execute)
    assert stacked == [["0"], ["2"], ["4"]]
