"""Trainings are handed out as they become known: no search waits for another, and none is scored before it is over."""

from dataclasses import dataclass, field
from pathlib import Path

from attnbench.comparison.schedule import Schedule


@dataclass(eq=False)
class Training:
    name: str
    done: set[str]

    @property
    def folder(self) -> Path:
        return Path(self.name)

    def is_done(self) -> bool:
        return self.name in self.done


@dataclass
class TwoSteps:
    """A plan of two searches, each of two steps of one training, then one score; it stands in for a Comparison."""

    done: set[str] = field(default_factory=set)
    rerun: bool = False
    only: tuple[str, ...] = ("a", "b")
    num_asked: int = 0

    def all_searches(self):
        return list("ab")

    def searched_and_scored(self, search):
        self.num_asked += 1
        first, second, scored = (Training(f"{search}{step}", self.done) for step in (1, 2, "scored"))
        searched = [first, second] if first.is_done() else [first]
        return searched, [scored] if all(cell.is_done() for cell in (first, second)) else []

    def wanted(self, cells):
        return [cell for cell in cells if cell.name.startswith(self.only)]

    def is_to_run(self, cell):
        return self.rerun or not cell.is_done()

    def in_order(self, cells):
        return cells


class Followed:
    """A schedule, and the names of what it hands out."""

    def __init__(self, plan: TwoSteps) -> None:
        self.plan, self.counted = plan, []
        counted = [Training(name, plan.done) for name in ("a1", "b1")]
        self.schedule = Schedule(plan, counted, count=lambda cells: self.counted.extend(cell.name for cell in cells))

    def known(self) -> list[str]:
        self.cells = {cell.name: cell for cell in self.schedule.known()}
        return [*self.cells]

    def after(self, *names: str, failed: bool = False) -> list[str]:
        self.plan.done |= set() if failed else set(names)
        self.schedule.ran([Training(name, self.plan.done) for name in names])
        return self.known()


def test_a_search_goes_on_and_is_scored_while_another_still_runs():
    followed = Followed(TwoSteps())
    assert followed.known() == ["a1", "b1"]
    assert followed.known() == []
    assert followed.after("a1") == ["a2"]
    assert followed.after("a2") == ["ascored"]
    assert followed.after("ascored") == []
    assert followed.after("b1") == ["b2"]
    # What is scored was counted ahead, and so were first steps.
    assert followed.counted == ["a2", "b2"]


def test_what_is_done_is_handed_out_with_what_it_makes_known():
    followed = Followed(TwoSteps(done={"a1", "a2", "b1"}))
    assert followed.known() == ["a1", "a2", "ascored", "b1", "b2"]


def test_run_again_a_search_is_over_before_anything_is_scored_at_its_rate():
    followed = Followed(TwoSteps(done={"a1", "a2", "ascored", "b1", "b2"}, rerun=True))
    assert followed.known() == ["a1", "a2", "b1", "b2"]
    assert followed.after("a1") == []
    assert followed.after("a2") == ["ascored"]
    assert followed.after("b1", "b2") == ["bscored"]
    # Once each at the beginning, and when the last of its trainings had run: every time all its results are read.
    assert followed.plan.num_asked == 4
    assert followed.after("ascored", "bscored") == []
    assert followed.plan.num_asked == 4


def test_a_search_with_a_training_that_failed_asks_for_nothing_more():
    followed = Followed(TwoSteps())
    followed.known()
    assert followed.after("a1", failed=True) == []
    assert followed.after("b1") == ["b2"]


def test_evaluations_that_are_not_to_run_are_not_handed_out():
    followed = Followed(TwoSteps(done={"a1", "a2"}, only=("b",)))
    assert followed.known() == ["b1"]
