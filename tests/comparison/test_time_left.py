"""The time left that a comparison prints, against the time that was left."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from attnbench.comparison.progress import CameOut, Kind, Progress
from attnbench.machine.processes import Outcome
from attnbench.results.rows import TRAINING
from attnbench.settings.schema import CONF

SIZES = {"recall": 39_321_600, "copy": 21_504_000, TRAINING: 41_943_040}
TOOK = {
    ("recall", "softmax"): [23, 27, 23],
    ("recall", "linear"): [27, 25, 24],
    ("recall", "gated_deltanet"): [31, 29, 25],
    ("copy", "softmax"): [8, 8, 9],
    ("copy", "linear"): [11, 11, 11],
    ("copy", "gated_deltanet"): [18, 17, 16],
    (TRAINING, "softmax"): [40, 41, 36],
    (TRAINING, "linear"): [29, 27, 27],
    (TRAINING, "gated_deltanet"): [30, 29, 29],
    **{("throughput", str(index)): [seconds] for index, seconds in enumerate((7, 6, 6, 8))},
    **{("memory", str(index)): [seconds] for index, seconds in enumerate((6, 6, 6, 7))},
    **{("scaling", str(index)): [seconds] for index, seconds in enumerate((5, 8, 5, 8))},
}
"""Seconds of the runs of plan=demo on two cores, by evaluation and variant."""

SOON = 20.0
"""Seconds of two timed runs or one training; less is not estimated."""

WORKERS = 2


def replayed(
    order: list[tuple[str, str]], costs: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, float, float | None]]:
    """Make the runs in this order by a clock of their own: seconds gone and left at each outcome, and the estimate.
    Seconds of runs that the estimate does not count are not among those left."""
    jobs: list[Any] = [
        SimpleNamespace(label=f"{kind} {seed}", kind=Kind(*kind, SIZES.get(kind[0], 1.0)), seconds=seconds)
        for kind in order
        for seed, seconds in enumerate(TOOK[kind])
    ]
    now, told = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("attnbench.comparison.progress.kind_of", lambda job: job.kind)
    monkeypatch.setattr("attnbench.comparison.progress.what_came_out", lambda job: CameOut(""))
    progress = Progress(Counter(job.kind for job in jobs), costs)
    for is_training, workers in ((True, WORKERS), (False, 1)):
        waiting = [job for job in jobs if job.kind.is_training == is_training]
        progress.begin(waiting, workers)
        going: list[tuple[float, Any]] = []
        while waiting or going:
            while waiting and len(going) < workers:
                job = waiting.pop(0)
                going.append((now + job.seconds, job))
            now, job = going.pop(going.index(min(going, key=lambda it: it[0])))
            progress.report(Outcome(item=job, seconds=job.seconds, error=None))
            known = {*costs, *(kind.group for kind in progress.seconds)}
            timed = [it for it in jobs if not it.kind.is_training and it.kind.group not in known]
            assert progress.uncounted() == len(timed)
            told.append((now, sum(it.seconds for it in timed), progress.seconds_left()))
    return [(gone, now - uncounted - gone, left) for gone, uncounted, left in told]


@pytest.mark.parametrize("first", ["recall", "copy", "linear", "softmax", "gated_deltanet", TRAINING])
@pytest.mark.parametrize(("has_costs", "error"), [(True, 0.3), (False, 0.5)])
def test_from_a_third_of_the_time_on_the_time_left_is_about_right(has_costs, error, first, monkeypatch):
    costs = yaml.safe_load((CONF / "plan" / "demo.yaml").read_text())["costs"] if has_costs else {}
    found = replayed(sorted(TOOK, key=lambda kind: first not in kind), costs, monkeypatch)
    later = [(left, told) for gone, left, told in found if gone > left / 2 and left > SOON]
    assert len(later) > 10
    assert all(told is not None and abs(told - left) <= error * left for left, told in later), later
    assert found[-1][2] == 0
    # Two runs of one kind are the first that tell anything.
    assert found[0][2] is not None
    assert 1 / 2 < found[0][2] / found[0][1] < 2
