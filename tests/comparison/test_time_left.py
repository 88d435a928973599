"""The time left that a comparison prints, against the time that was left."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from attnbench.comparison.progress import Kind, Progress
from attnbench.machine.processes import Outcome
from attnbench.results.rows import TRAINING
from attnbench.settings.schema import CONF

SIZES = {"recall": 39_321_600, "copy": 21_504_000, TRAINING: 41_943_040}
TOOK = {
    ("recall", "softmax"): [51.4, 55.7, 51.3],
    ("recall", "linear"): [59.9, 62.4, 64.8],
    ("recall", "gated_deltanet"): [77.0, 71.0, 30.9],
    ("copy", "softmax"): [48.5, 48.9, 28.5],
    ("copy", "linear"): [26.3, 22.7, 30.3],
    ("copy", "gated_deltanet"): [47.6, 52.5, 55.3],
    (TRAINING, "softmax"): [117.9, 113.7, 87.0],
    (TRAINING, "linear"): [73.7, 88.2, 87.2],
    (TRAINING, "gated_deltanet"): [79.8, 76.1, 86.3],
    **{("throughput", str(index)): [seconds] for index, seconds in enumerate((29.4, 29.8, 26.6, 25.1))},
    **{("memory", str(index)): [seconds] for index, seconds in enumerate((18.2, 15.3, 14.2, 16.4))},
    **{("scaling", str(index)): [seconds] for index, seconds in enumerate((13.1, 13.2, 16.8, 14.0))},
}
"""Seconds of the runs of plan=demo on two cores that had other work too, by evaluation and variant."""

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
    monkeypatch.setattr("attnbench.comparison.progress.what_came_out", lambda job: ("", None))
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
@pytest.mark.parametrize(("has_costs", "error"), [(True, 0.3), (False, 0.4)])
def test_from_a_third_of_the_time_on_the_time_left_is_about_right(has_costs, error, first, monkeypatch):
    costs = yaml.safe_load((CONF / "plan" / "demo.yaml").read_text())["costs"] if has_costs else {}
    found = replayed(sorted(TOOK, key=lambda kind: first not in kind), costs, monkeypatch)
    later = [(left, told) for gone, left, told in found if gone > left / 2 and left > 1]
    assert len(later) > 20
    assert all(told is not None and abs(told - left) <= error * left for left, told in later), later
    assert found[-1][2] == 0
