"""Progress of a plan: outcomes, runs under way, and an estimate of the remaining time."""

import heapq
import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.comparison.program import Failure, read_or_failure
from attnbench.comparison.stacks import activations
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.bars import COLUMNS, bar, in_notebook
from attnbench.machine.environment import machine
from attnbench.machine.processes import Outcome
from attnbench.report.sections.words import metric_name, where
from attnbench.results.folder import ROOT
from attnbench.results.job import Job
from attnbench.results.rows import TEST_OF_BEST, TRAINING, Measurement, ResultRow
from attnbench.settings.escape import printable
from attnbench.settings.untrusted import MAX_JSON_BYTES, parse_json, read_bounded
from attnbench.training.hooks import duration
from attnbench.training.job import Run
from attnbench.verdict.axes import key_of
from attnbench.verdict.seeds import is_accuracy

log = logging.getLogger(__name__)

LEVELS: tuple[tuple[Callable[["Kind"], Any], int], ...] = (
    (lambda kind: None, 0),
    (lambda kind: kind.is_training, 0),
    (lambda kind: kind.group, 1),
    (lambda kind: kind, 1),
)
"""Sets of runs, from coarse to fine, by which a guess of seconds is scaled to what was measured, and the weight of the
guess in finished runs: the first to finish are often those of the cheapest variant."""


class Kind(NamedTuple):
    """Cells that take about equally long: of one evaluation, variant, task and number of steps."""

    group: str
    """The evaluation's name, or TRAINING."""
    name: str
    """For people: recall linear, num_pairs 16."""
    size: float = 1.0
    """Elements of an activation over all steps, to which times are proportional; 1 if it is no training."""

    @property
    def is_training(self) -> bool:
        return self.size > 1


def kind_of(job: Job) -> Kind:
    if isinstance(job, ProbeJob):
        return Kind(job.evaluation, job.task_label, activations(job) * (job.limit or job.task.num_steps))
    if isinstance(job, Run):
        elements = job.train.batch_size * job.seq_len * job.matched.model.dim
        return Kind(job.evaluation, job.task_label, elements * job.num_steps)
    return Kind(job.evaluation, job.task_label)


def stages(kinds: Counter[Kind]) -> Counter[str]:
    """Count runs by evaluation, in words."""
    counts: Counter[str] = Counter()
    for kind, number in kinds.items():
        counts["language models" if kind.group == TRAINING else kind.group.replace("_", " ")] += number
    return counts


class Progress:
    """Prints a line per finished run, and the running ones with the time left: on a terminal in two lines below, in a
    file after each line. A notebook shows only a bar.

    Args:
        left: number of runs by kind.
        tells_now: name the running jobs; they must run in the given order.
        costs: seconds per run by evaluation, as the plan states them, divided by the runs at a time.
    """

    def __init__(self, left: Counter[Kind], costs: Mapping[str, float], *, tells_now: bool = True) -> None:
        self.tells_now = tells_now
        self.left, self.total, self.costs = left, left.total(), costs
        self.of_stage = stages(left)
        self.seconds: dict[Kind, list[float]] = {}
        self.skipped: set[Path] = set()
        self.waiting: list[Job] = []
        self.bests: dict[tuple[str, ...], tuple[float, str]] = {}
        """Rank of the best score, the higher the better, and its text, by evaluation, metric and task."""
        self.began: list[float] = []
        """By the clock, of the runs under way, which are the first that wait."""
        self.at_a_time = 1
        self.in_notebook = in_notebook()
        shapes = ["{n_fmt}/{total_fmt} |{bar}| {desc}"] if self.in_notebook else ["{desc}", "{desc}"]
        bars = [bar(total=self.total, bar_format=shape, leave=False) for shape in shapes]
        self._bars = [it for it in bars if it is not None]

    def add(self, jobs: Sequence[Job]) -> None:
        """Add runs that were not known at the beginning."""
        kinds = Counter(kind_of(job) for job in jobs)
        self.left.update(kinds)
        self.of_stage.update(stages(kinds))
        self.total += len(jobs)

    def skip(self, jobs: Sequence[Job]) -> None:
        """Count finished runs, each once; timed runs, which are asked for last, may be given from the beginning."""
        new = {job.folder: job for job in jobs if job.folder not in self.skipped}
        self.skipped.update(new)
        self.left.subtract(map(kind_of, new.values()))
        if new and not self.in_notebook:
            log.info(f"[{self.total - self.left.total()}/{self.total}] {len(new)} were done before")

    def begin(self, jobs: Sequence[Job], at_a_time: int) -> None:
        """Set the runs that come next, in their order."""
        self.waiting, self.at_a_time = list(jobs), at_a_time
        self.began = [time.monotonic()] * min(at_a_time, len(jobs))
        if jobs:
            self._show("" if self._bars else self._number())

    def extend(self, jobs: Sequence[Job]) -> None:
        """Add runs that come before the waiting ones."""
        self.waiting[self.at_a_time : self.at_a_time] = jobs

    def report(self, outcome: Outcome[Job]) -> None:
        job, kind = outcome.item, kind_of(outcome.item)
        self.left[kind] -= 1
        index = self.waiting.index(job)
        del self.waiting[index], self.began[index : index + 1]
        if len(self.began) < min(self.at_a_time, len(self.waiting)):
            self.began.append(time.monotonic())
        share = outcome.seconds / self.at_a_time
        self.seconds.setdefault(kind, []).append(share)
        became = what_came_out(job) if outcome.error is None else CameOut(f"failed: {outcome.error}")
        if became.row is not None and became.higher_is_better is not None and kind.is_training:
            self._keep_best(kind, became.row, 1 if became.higher_is_better else -1)
        line = f"{self._number()} {job.label}: {became.text}, {duration(outcome.seconds)}"
        self._show(line, is_wanted=outcome.error is not None)

    def _keep_best(self, kind: Kind, row: ResultRow, sign: int) -> None:
        score = row.measurement
        assert score.value is not None
        task = kind.group, *key_of(row)
        new = sign * score.value, f"{row.identity.variant} {_number(score)}"
        # The task of the run that finished last comes last.
        self.bests[task] = max(self.bests.pop(task, new), new)

    def close(self) -> None:
        """Remove the status below the lines."""
        for it in reversed(self._bars):
            it.close()

    def _number(self) -> str:
        return f"[{self.total - self.left.total()}/{self.total}]"

    def _show(self, line: str, *, is_wanted: bool = False) -> None:
        """Show the status and, unless in a notebook that does not want it, the line."""
        left, going, best = self.seconds_left(), [], []
        whole = [f"about {duration(left)} to go"] if left else []
        if whole and (uncounted := self.uncounted()):
            whole[0] += f" and {uncounted} timed runs"
        if self.waiting and self.tells_now:
            kind, others = kind_of(self.waiting[0]), min(self.at_a_time, len(self.waiting)) - 1
            [stage] = stages(Counter([kind]))
            done = self.of_stage[stage] - stages(self.left)[stage]
            whole.append(f"{stage} {done}/{self.of_stage[stage]}")
            best = [f"best {best}" for task, (_, best) in self.bests.items() if task[0] == kind.group][-1:]
            going = [f"now {kind.name.removeprefix(f'{kind.group} ')}{f' and {others} more' if others else ''}"]
        if not self._bars:
            status = ", ".join([*whole, *best, *going])
            log.info(f"{line} ({status})" if status else line)
            return
        if line and (is_wanted or not self.in_notebook):
            log.info(line)
        numbered = [" ".join([self._number(), *whole[:1]]), *whole[1:]]
        shown = [[*whole, *going, *best]] if self.in_notebook else [numbered, [*going, *best]]
        for it, parts in zip(self._bars, shown, strict=True):
            it.total, it.n = self.total, self.total - self.left.total()
            it.set_description_str(fitting(parts))

    def seconds_left(self) -> float | None:
        """Estimate from the times of finished runs and, in proportion to them, the plan's costs, without the runs that
        `uncounted` has. None before the first run, because costs are of another machine, which may be three times as
        slow; and where nothing is known of some trainings."""
        guess = self._guess() if self.seconds else {}
        if not guess:
            return None
        # Runs under way first, then the others, each as soon as another ends; what is timed runs alone, at the end.
        left, now, ends = +self.left, time.monotonic(), [0.0] * self.at_a_time
        for index, (job, began) in enumerate(zip(self.waiting, self.began, strict=False)):
            kind = kind_of(job)
            left[kind] -= 1
            ends[index] = max(0.0, guess.get(kind, 0.0) * self.at_a_time - (now - began))
        heapq.heapify(ends)
        for kind in left.elements():
            if kind.is_training:
                heapq.heappush(ends, heapq.heappop(ends) + guess[kind] * self.at_a_time)
        return max(ends) + sum(guess.get(kind, 0.0) for kind in left.elements() if not kind.is_training)

    def uncounted(self) -> int:
        """Count the timed runs of evaluations without stated costs of which none has finished."""
        known = {*self.costs, *(kind.group for kind in self.seconds)}
        return sum(number for kind, number in (+self.left).items() if not (kind.is_training or kind.group in known))

    def _guess(self) -> dict[Kind, float]:
        """Guess seconds by kind, divided by the runs at a time; empty if nothing is known of some trainings."""
        ran = [(kind, seconds) for kind, took in self.seconds.items() for seconds in took]
        kinds, guess = list(dict.fromkeys([*self.left, *self.seconds])), {}
        sizes, alike = defaultdict[str, list[float]](list), defaultdict[Any, list[tuple[float, float]]](list)
        for kind in kinds:
            sizes[kind.group].append(kind.size)
        # No training tells how long a timed run takes, nor does a timed run of another evaluation.
        for kind, seconds in ran:
            alike[kind.is_training or kind.group].append((seconds, kind.size))
        for kind in kinds:
            if cost := self.costs.get(kind.group):
                guess[kind] = cost * kind.size / statistics.fmean(sizes[kind.group])
            elif known := alike[kind.is_training or kind.group]:
                guess[kind] = kind.size * sum(seconds for seconds, _ in known) / sum(size for _, size in known)
            elif kind.is_training and self.left[kind] > 0:
                return {}
        kinds = list(guess)
        for level, weight in LEVELS:
            guessed, measured, number = defaultdict[Any, float](float), defaultdict[Any, float](float), Counter[Any]()
            for kind, seconds in ran:
                guessed[level(kind)] += guess[kind]
                measured[level(kind)] += seconds
                number[level(kind)] += 1
            for kind in kinds:
                it = level(kind)
                if number[it]:
                    given = weight * guessed[it] / number[it]
                    guess[kind] *= (measured[it] + given) / (guessed[it] + given)
        return guess


class CameOut(NamedTuple):
    text: str
    """Score of a run in words (accuracy 98 %, pairs 16), or the reason why it has none."""
    row: ResultRow | None = None
    """Row of the score."""
    higher_is_better: bool | None = None
    """None: its evaluation has no primary metric, which would tell."""


def what_came_out(job: Job) -> CameOut:
    answer = read_or_failure(path for path in job.all_results if path.exists())
    if isinstance(answer, Failure):
        return CameOut(answer.reason)
    ways = [(part, part.primary and part.primary.higher_is_better) for part in job.parts]
    plots = [(*pair, is_better) for part, is_better in ways for pair in part.plots[:1]]
    for metric, axis, is_better in (*plots, ("selection", "", True), ("nats_per_character", "", False)):
        scores = [row for row in answer if row.measurement.metric == metric and _is_score(row.measurement)]
        if scores:
            last = scores[-1].measurement
            at = where({axis: last.settings[axis]}) if axis in last.settings else ""
            shown = f", {at}" if at and at not in job.label else ""
            return CameOut(f"{metric_name(metric, last.unit)} {_number(last)}{shown}", scores[-1], is_better)
    failed = (f"{it.status}: {it.reason}" for it in (row.measurement for row in answer) if it.status != "ok")
    return CameOut(next(failed, "no number"))


def fitting(parts: Sequence[str]) -> str:
    """Join the first parts that fit into a line of a terminal."""
    texts = [printable(", ".join(parts[:number])) for number in range(1, len(parts) + 1)]
    return next((text for text in reversed(texts) if len(text) <= COLUMNS), texts[0][:COLUMNS] if texts else "")


def _number(score: Measurement) -> str:
    assert score.value is not None
    return f"{100 * score.value:.3g} %" if is_accuracy(score.metric) else f"{score.value:.4g}"


def _is_score(row: Measurement) -> bool:
    is_read = all(row.settings.get(name, value) == value for name, value in TEST_OF_BEST.items())
    return row.value is not None and (is_read or row.metric in ("selection", "nats_per_character"))


def say_why_again(jobs: Sequence[Job]) -> None:
    """Log the differences of this machine from the one that measured these timed runs before."""
    said: set[str] = set()
    for job in jobs:
        folder = job.folder
        now = machine(job.device, ROOT)
        for other in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/environment.json")):
            if other.parent == folder or not any(other.parent.glob("results/*.jsonl")):
                continue
            try:
                then = parse_json(read_bounded(other, MAX_JSON_BYTES))
            except (OSError, ValueError):
                continue
            names = [name for name in now if isinstance(then, dict) and name in then]
            changed = [f"{name} {then[name]} is {now[name]} now" for name in names if then[name] != now[name]]
            if changed:
                said.add("; ".join(changed))
    for difference in sorted(said):
        why = " (OMP_NUM_THREADS, or the cores that the process may use)" if "threads)" in difference else ""
        log.info(f"timed runs are measured again, because the machine changed: {difference}{why}")
