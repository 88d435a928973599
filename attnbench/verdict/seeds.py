"""Rows of single seeds to figures over seeds."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnbench.results.corpora import split_name
from attnbench.results.metrics import is_timed
from attnbench.results.numbers import format_interval, format_number, format_within
from attnbench.results.rows import (
    EVALUATION_OPTIONS,
    MAX_NUMBER,
    REFERENCE,
    REFERENCE_RATIO,
    Identity,
    Measurement,
    ResultRow,
    is_search,
    same_corpus,
)
from attnbench.results.tables import sittings_line
from attnbench.settings.errors import UserError
from attnbench.settings.schema import FEW_SEEDS
from attnbench.verdict.axes import Key, axes, grouped, key_of, with_options_as_axes, with_precision
from attnbench.verdict.levels import totals
from attnbench.verdict.statistics import bounded_interval, share_interval, student_interval

ALIKE = ("mixer", "backend", "model", "parameters", "seq_len", "precision", "num_devices")

MOST_MOVED = 1.1
"""Largest time of a reference over its smallest, in one table, at which timings are ranked."""

BESIDE_REFERENCE = ("throughput", "inference", "scaling")
"""Evaluations that time a reference beside each run; rows of earlier versions have none."""

RATIO_NOTE = (
    "×: time or speed relative to torch's own softmax layers, timed just before and after the run. A steady load slows "
    "both: compare these ratios, not the times. tokens/s: more is better; a step's time: less."
)

IN_WORDS = {"out_of_memory": "ran out of memory", "unsupported": "is not supported"}
"""Statuses as they follow a variant's name; others are printed without underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    identity: Identity
    """Columns common to all rows; several devices, environments or commits are joined by commas."""
    names: tuple[str, ...]
    """The variant, and other variants that are one model with it in this evaluation."""
    metric: str
    unit: str
    settings: dict[str, Any]
    """The axes, without PER_RUN."""
    values: dict[int, float]
    """Value by seed. A diverged seed counts as chance if its row names that; a seed that did not reach its goal has
    none."""
    mean: float | None
    low: float | None
    """95 % interval over seeds, within 0..1 for accuracies; for a single seed, the interval of its row if any."""
    high: float | None
    item_low: float | None
    """95 % interval over items: for accuracies, pooled over all seeds; for nats, over blocks of the text or its
    authors."""
    item_high: float | None
    num_samples: int | None
    """Items (labels, repetitions) of one seed's row, the minimum over seeds; None if any row lacks them."""
    statuses: dict[str, int]
    reason: str
    not_applicable: tuple[str, ...]
    """Settings of the evaluation that this mixer does not have."""
    sittings: tuple[str, ...] = ()
    """Process starts that measured its rows; see `ResultRow.measured_in`."""
    references: tuple[float, ...] = ()
    """Milliseconds of the reference beside its rows; see evals/lib/reference.py."""
    ratio: float | None = None
    """The mean over that of the reference; None where a row has none."""
    batch_size: int | None = None
    """Sequences at a time, of a cost whose settings do not name them."""

    @property
    def variant(self) -> str:
        return self.identity.variant

    @property
    def evaluation(self) -> str:
        return self.identity.evaluation

    @property
    def label(self) -> str:
        return " = ".join(self.names)

    @property
    def place(self) -> dict[str, Any]:
        """The settings; of a cost at one batch and length, these too."""
        told = {"sequence_length": self.identity.seq_len, "batch_size": self.batch_size}
        return self.settings | (told if self.batch_size is not None else {})

    @property
    def without(self) -> str:
        return f"without {', '.join(self.not_applicable)}" if self.not_applicable else ""

    @property
    def text(self) -> str:
        """The mean, with as many digits as its interval supports."""
        if self.mean is None:
            return ""
        if self.is_of_few:
            return format_within(self.mean, *self.range)
        low, high = (self.low, self.high) if self.low is not None else (self.item_low, self.item_high)
        return format_within(self.mean, low, high)

    @property
    def number(self) -> str:
        return f"{self.mean:.3f}" if self.has_range and is_accuracy(self.metric) else self.ratio_text + self.text

    @property
    def ratio_text(self) -> str:
        return "" if self.ratio is None or self.mean is None else f"{self.ratio:.3g}×, "

    @property
    def spread(self) -> str:
        """Range of accuracies and of few seeds, interval of others: intervals of accuracies allow for failures that no
        seed showed, those of few seeds for spreads that none showed."""
        if not is_accuracy(self.metric) and len(self.values) > 1 and len({*self.values.values()}) == 1:
            # Equal for all seeds, as FLOPs are.
            return ""
        if not self.has_range:
            return format_interval(self.low, self.high)
        low, high = self.range
        ends = [f"{end:.3f}" if is_accuracy(self.metric) else format_number(end) for end in (low, high)]
        return f"({' to '.join(ends)})"

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values.values()), max(self.values.values())

    @property
    def is_of_few(self) -> bool:
        return 1 < len(self.values) <= FEW_SEEDS

    @property
    def has_range(self) -> bool:
        """True where seeds are shown one by one, and no interval."""
        return self.mean is not None and len(self.values) > 1 and (is_accuracy(self.metric) or self.is_of_few)

    @property
    def partly(self) -> str:
        """Text such as "3 of 5 seeds", "2 at chance of 5 seeds", "not reached by 2 of 5"."""
        num_ok, num_seeds = self.statuses.get("ok", 0), sum(self.statuses.values())
        if num_ok == num_seeds:
            return ""
        if "not_reached" in self.statuses:
            return f"not reached by {num_seeds - num_ok} of {num_seeds} seeds"
        counted = f"{num_seeds - num_ok} at chance" if len(self.values) == num_seeds else f"{num_ok}"
        return f"{counted} of {num_seeds} seeds"

    @property
    def lack(self) -> str:
        """Text such as "not reached (3 of 3 seeds)", "out of memory"."""
        if [*self.statuses] == ["not_reached"]:
            if self.metric == "tokens_per_second":
                # Too few steps; no threshold was missed.
                return "not measured"
            number = self.statuses["not_reached"]
            return f"not reached ({number} of {number} seeds)" if number > 1 else "not reached"
        return " and ".join(status.replace("_", " ") for status in self.statuses)

    @property
    def num_diverged(self) -> int:
        return self.statuses.get("diverged", 0)

    @property
    def obstacle(self) -> str:
        """Text such as "ran out of memory at 2 of 5 seeds"."""
        num_seeds = sum(self.statuses.values())
        if len(self.values) == num_seeds:
            return ""
        without = {status: count for status, count in self.statuses.items() if status != "ok"}
        words = {status: IN_WORDS.get(status, status.replace("_", " ")) for status in without}
        return ", ".join(f"{words[status]} at {count} of {num_seeds} seeds" for status, count in without.items())

    @property
    def key(self) -> Key:
        return self.evaluation, self.metric, json.dumps(self.settings, sort_keys=True)


def figures(rows: Iterable[ResultRow], shared: Mapping[str, Mapping[str, str]] | None = None) -> list[Figure]:
    """Aggregate rows by (variant, evaluation, metric, setting); rows of search seeds are left out. Refused are two rows
    of one seed for one figure, seeds that ran differently, rows of several corpora for one metric and setting, and
    aggregated rows.

    Args:
        shared: by evaluation, variants that have the rows of another variant, and that variant.
    """
    rows = [row for row in with_options_as_axes(with_precision(list(rows))) if not is_search(row.identity.seed)]
    rows += totals(rows)
    for group in grouped(rows, key_of).values():
        same_corpus(group)
    groups = grouped(rows, lambda row: (row.identity.variant, *key_of(row)))
    return [_figure(group, shared or {}) for group in groups.values()]


def same_models(shared: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Name variants that are one model with another: "flash is softmax in recall, copy"."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for evaluation, first_by_name in shared.items():
        for pair in first_by_name.items():
            pairs.setdefault(pair, []).append(evaluation)
    return [f"{name} is {first} in {', '.join(names)}" for (name, first), names in pairs.items()]


def sittings_lead(named: Iterable[tuple[str, Figure]]) -> str:
    """Return why timings of one name may not be ranked: several sittings, no reference, or one that moved."""
    timed: dict[str, list[str]] = {}
    references: dict[tuple[Any, ...], list[float]] = {}
    without: dict[str, set[str]] = {}
    for name, figure in named:
        if figure.mean is not None and is_timed(figure.metric, figure.unit):
            timed.setdefault(name, []).extend(figure.sittings)
            if split_name(figure.evaluation)[0] in BESIDE_REFERENCE and not figure.references:
                without.setdefault(name, set()).add(figure.variant)
            it = figure.identity
            # References of other models or lengths take other times.
            key = name, it.model, it.seq_len, it.precision, it.device
            references.setdefault(key, []).extend(figure.references)
    unseen = [name for name, variants in without.items() if len(variants) > 1 and len({*timed[name]}) == 1]
    reasons = sittings_line(timed), _without_line(unseen), _references_line(references)
    return " ".join(filter(None, reasons))


def _without_line(names: Sequence[str]) -> str:
    told = "No ranking of speed: no reference timed beside each run shows whether the load changed"
    return f"{told}: {'; '.join(names)}." if names else ""


def _references_line(references: Mapping[tuple[Any, ...], Sequence[float]]) -> str:
    ends = [(name, min(times), max(times)) for (name, *_), times in references.items() if times]
    moved = [
        f"{name} ({format_number(low)} to {format_number(high)} ms)"
        for name, low, high in ends
        if high > MOST_MOVED * low
    ]
    if not moved:
        return ""
    return f"No ranking of speed: the load changed, as a reference timed beside each run shows: {'; '.join(moved)}."


def _figure(group: list[ResultRow], shared: Mapping[str, Mapping[str, str]]) -> Figure:
    measurements = _by_seed(group)
    first, identity = group[0].measurement, _common_identity(group)
    measured = [measurement for measurement in measurements.values() if measurement.status == "ok"]
    counted = {seed: _counted(entry) for seed, entry in measurements.items()}
    values = {seed: value for seed, value in counted.items() if value is not None}
    # Without any number the status says more than the value it counts as.
    mean, low, high = _over_seeds(list(measurements.values()), list(values.values())) if measured else (None,) * 3
    item_low, item_high = _over_items(measured)
    wishes = first.settings.get("not_applicable")
    counts = [measurement.num_samples for measurement in measured]
    known = [count for count in counts if count is not None]
    ratios = [entry.settings[REFERENCE_RATIO] for entry in measured if REFERENCE_RATIO in entry.settings]
    same = [name for name, other in shared.get(identity.evaluation, {}).items() if other == identity.variant]
    return Figure(
        identity=identity,
        names=(identity.variant, *same),
        metric=first.metric,
        unit=first.unit,
        settings=axes(first.settings),
        values=values,
        mean=mean,
        low=low,
        high=high,
        item_low=item_low,
        item_high=item_high,
        num_samples=min(known) if known and len(known) == len(counts) else None,
        statuses=dict(Counter(measurement.status for measurement in measurements.values())),
        reason=next((entry.reason for entry in measurements.values() if entry.status != "ok"), ""),
        not_applicable=tuple(map(str, wishes)) if isinstance(wishes, list) else (),
        sittings=tuple(sorted({row.measured_in for row in group})),
        references=tuple(ms for entry in measured for ms in entry.settings.get(REFERENCE, ())),
        ratio=float(np.mean(ratios)) if ratios and len(ratios) == len(measured) else None,
        batch_size=_unnamed_batch_size(group[0]),
    )


def _unnamed_batch_size(row: ResultRow) -> int | None:
    it, options = row.measurement, row.measurement.settings.get(EVALUATION_OPTIONS, {})
    is_cost = is_timed(it.metric, it.unit) or it.unit == "MiB"
    is_unnamed = split_name(row.identity.evaluation)[0] == "scaling" and "batch_size" not in it.settings
    return options.get("batch_size") if is_cost and is_unnamed and isinstance(options, dict) else None


def _by_seed(group: Sequence[ResultRow]) -> dict[int, Measurement]:
    rows: dict[int, ResultRow] = {}
    for row in group:
        seed, run = row.identity.seed, row.identity.run
        if seed in rows:
            raise UserError(
                f"{_what(row)}: seed {seed} was measured twice, in {rows[seed].identity.run} and in {run}; "
                "leave one of them out, or give their variants different names"
            )
        rows[seed] = row
    return {seed: row.measurement for seed, row in rows.items()}


def _common_identity(group: Sequence[ResultRow]) -> Identity:

    def joined(column: str, *, in_order: bool = False) -> str:
        values = dict.fromkeys(getattr(row.identity, column) for row in group)
        return ", ".join(sorted(values) if in_order else values)

    return replace(
        group[0].identity,
        run="",
        config_hash="",
        experiment=joined("experiment"),
        device=joined("device"),
        environment=joined("environment", in_order=True),
        commit=joined("commit", in_order=True),
        **{column: _alike(group, column) for column in ALIKE},
    )


def _alike(group: Sequence[ResultRow], column: str) -> Any:
    runs = {getattr(row.identity, column): row.identity.run for row in group}
    if len(runs) > 1:
        runs.pop(None, None)
    if len(runs) > 1:
        values = ", ".join(f"{value} in {run}" for value, run in runs.items())
        raise UserError(f"{_what(group[0])}: its seeds differ in {column} ({values}), so that they have no common mean")
    return next(iter(runs))


def _counted(measurement: Measurement) -> float | None:
    """For a diverged seed chance, if its row names it."""
    return measurement.settings.get("chance") if measurement.status == "diverged" else measurement.value


def _over_seeds(
    measured: Sequence[Measurement], values: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    if len(measured) == 1:
        return values[0], measured[0].low, measured[0].high
    metric = measured[0].metric
    is_bounded = (metric == "solved" or is_accuracy(metric)) and all(0 <= value <= 1 for value in values)
    interval = bounded_interval(values) if is_bounded else student_interval(values)
    if any(end is not None and abs(end) > MAX_NUMBER for end in (interval.low, interval.high)):
        return interval.mean, None, None
    return interval.mean, interval.low, interval.high


def is_accuracy(metric: str) -> bool:
    return metric == "selection" or metric.endswith("accuracy")


def _over_items(measured: Sequence[Measurement]) -> tuple[float | None, float | None]:
    """Return the interval over items, pooled over seeds, which draw their own test items. A text is common to all
    seeds: the mean of their intervals is at least as wide as the interval of their mean."""
    of_text = [entry for entry in measured if entry.unit == "nat" and "split" in entry.settings]
    ends = [(entry.low, entry.high) for entry in of_text if entry.low is not None and entry.high is not None]
    if ends and len(ends) == len(measured):
        return tuple(np.mean(ends, axis=0).tolist())
    samples = [
        (entry.value, entry.num_samples)
        for entry in measured
        if entry.metric.endswith("accuracy") and entry.value is not None and 0 <= entry.value <= 1 and entry.num_samples
    ]
    if not samples or len(samples) < len(measured):
        return None, None
    num_items = sum(count for _, count in samples)
    return share_interval(sum(rate * count for rate, count in samples), num_items)


def _what(row: ResultRow) -> str:
    where = ", ".join(f"{name}={value}" for name, value in axes(row.measurement.settings).items())
    name = f"{row.identity.evaluation} {row.measurement.metric} of {row.identity.variant}"
    return f"{name} at {where}" if where else name
