"""From rows of single seeds to figures over seeds: one metric of one variant at one setting."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnbench.results.rows import (
    ALL_SEEDS,
    EVALUATION_OPTIONS,
    MIXER_OPTIONS,
    SELECTION_SEED,
    Identity,
    Measurement,
    ResultRow,
    same_corpus,
)
from attnbench.settings.errors import UserError
from attnbench.verdict.statistics import mean_interval, proportion_interval

PER_RUN = (
    *("learning_rate", "not_applicable", "rate_at_edge", "rate_from", "backend"),
    *(MIXER_OPTIONS, EVALUATION_OPTIONS),
)
"""Settings that say how a run came about; they are no axis, and may differ between the seeds of one figure. Options of
an evaluation that do differ become axes first, see `with_options_as_axes`."""

ALIKE = ("mixer", "backend", "model", "parameters", "seq_len", "precision", "num_devices")
"""Columns in which the seeds of one figure may not differ: they would be figures of different things."""

TOLD_APART_BY = {"model": " {}", "seq_len": " T{}", "precision": " {}"}
"""Columns that make another variant of one, and how they follow its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One metric of one variant at one setting, over its seeds."""

    experiment: str
    variant: str
    names: tuple[str, ...]
    """The variant, and others that are one model with it in this evaluation and have no figure of their own."""
    backend: str
    mixer: str
    model: str
    parameters: int | None
    seq_len: int | None
    evaluation: str
    metric: str
    unit: str
    settings: dict[str, Any]
    """The axes, without PER_RUN."""
    values: dict[int, float]
    """By seed, of those that ended ok."""
    mean: float | None
    low: float | None
    """Student's 95 % interval over seeds; of a single seed its row's own (percentiles of a timing), if it has one."""
    high: float | None
    item_low: float | None
    """Of an accuracy, Wilson's 95 % interval over the items of all seeds together."""
    item_high: float | None
    num_samples: int | None
    """Items (labels, repetitions) of one seed's row, the fewest of any; None where a row does not say."""
    statuses: dict[str, int]
    """How many seeds ended how."""
    reason: str
    """Of the first row that is not ok."""
    learning_rates: dict[int, float]
    """By seed; empty where the rows name none."""
    not_applicable: tuple[str, ...]
    """Settings that the evaluation gives every mixer that has them, and this one has not."""
    precision: str
    device: str
    """Several names, with commas between, where the seeds were measured on several."""
    num_devices: int
    corpus: str | None
    environments: frozenset[str]
    commits: frozenset[str]

    @property
    def label(self) -> str:
        """All its names: "softmax = flash"."""
        return " = ".join(self.names)

    @property
    def without(self) -> str:
        """These settings in words that stand beside the score, or nothing."""
        return f"without {', '.join(self.not_applicable)}" if self.not_applicable else ""


def figures(rows: Iterable[ResultRow], shared: Mapping[str, Mapping[str, str]] | None = None) -> list[Figure]:
    """One figure for every (variant, evaluation, metric, setting), in the order in which the rows name them.

    Of an operator the precision is a setting like any other, where its rows have several. Rows of the seed
    that learning rates are chosen on are left out.

    Args:
        shared: by evaluation, variants whose rows there are another's, and whose.

    Raises:
        UserError: two rows of one seed for one figure, seeds of one figure that ran differently, rows of several
            corpora for one metric at one setting, or rows that are over seeds already.
    """
    places: dict[tuple[str, str, str], list[ResultRow]] = {}
    groups: dict[tuple[str, ...], list[ResultRow]] = {}
    for row in with_options_as_axes(_with_precision(list(rows))):
        if row.identity.seed == SELECTION_SEED:
            continue
        place = place_of(row.identity.evaluation, row.measurement.metric, axes(row.measurement.settings))
        places.setdefault(place, []).append(row)
        groups.setdefault((row.identity.variant, *place), []).append(row)
    for group in places.values():
        same_corpus(group)
    return [_figure(group, shared or {}) for group in groups.values()]


def _with_precision(rows: list[ResultRow]) -> list[ResultRow]:
    """The rows, those of operators, which are no mixer's, with the precision among their settings if it varies."""
    precisions = {row.identity.precision for row in rows if not row.identity.mixer}
    if len(precisions) < 2:
        return rows
    return [row if row.identity.mixer else _told(row) for row in rows]


def _told(row: ResultRow) -> ResultRow:
    settings = {**row.measurement.settings, "precision": row.identity.precision}
    return replace(row, measurement=replace(row.measurement, settings=settings))


def same_models(shared: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Variants that are one model with another, and where, in words: "flash is softmax in recall, copy"."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for evaluation, found in shared.items():
        for name, first in found.items():
            pairs.setdefault((name, first), []).append(evaluation)
    return [f"{name} is {first} in {', '.join(names)}" for (name, first), names in pairs.items()]


def with_options_as_axes(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows, with those options of their evaluation among the axes that differ between rows at one place.

    What was trained for 500 steps is then at another place than what was trained for 1,500, and neither averaged nor
    compared with it.
    """
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        options = row.measurement.settings.get(EVALUATION_OPTIONS)
        if isinstance(options, dict):
            place = place_of(row.identity.evaluation, row.measurement.metric, axes(row.measurement.settings))
            places.setdefault(place, []).append(options)
    telling: dict[str, dict[str, None]] = {}
    for (evaluation, *_), found in places.items():
        for name in dict.fromkeys(name for options in found for name in options):
            if len({json.dumps(options.get(name), sort_keys=True) for options in found}) > 1:
                telling.setdefault(evaluation, {})[name] = None
    return [_with_axes(row, telling.get(row.identity.evaluation, {})) for row in rows]


def _with_axes(row: ResultRow, names: Iterable[str]) -> ResultRow:
    settings = row.measurement.settings
    added = {name: settings.get(EVALUATION_OPTIONS, {}).get(name) for name in names}
    return replace(row, measurement=replace(row.measurement, settings={**added, **settings})) if added else row


def axes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that belong to a run."""
    return {name: value for name, value in settings.items() if name not in PER_RUN}


def place_of(evaluation: str, metric: str, settings: dict[str, Any]) -> tuple[str, str, str]:
    """A key for one metric at one setting."""
    return evaluation, metric, json.dumps(settings, sort_keys=True)


def told_apart(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Models of one variant at several lengths, sizes or precisions, a sweep's say, under names of their own:
    "softmax T512". What else tells those of a variant and seed apart only their hash can name. Of operators, which are
    no mixer's, `figures` takes what differs for a setting."""
    rows = with_options_as_axes(rows)
    measured: dict[tuple[Any, ...], list[Identity]] = {}
    for row in (row for row in rows if row.identity.mixer):
        place = place_of(row.identity.evaluation, row.measurement.metric, axes(row.measurement.settings))
        measured.setdefault((row.identity.variant, row.identity.seed, *place), []).append(row.identity)
    endings: dict[str, dict[str, str]] = {}
    for (variant, *_), twice in measured.items():
        if len(twice) > 1:
            shown = endings.setdefault(variant, {})
            shown |= {column: form for column, form in TOLD_APART_BY.items() if _differs(column, twice)}
            if not shown:
                shown["config_hash"] = " {}"

    def named(own: Identity) -> Identity:
        shown = endings.get(own.variant, {}) if own.mixer else {}
        ending = "".join(form.format(getattr(own, column)) for column, form in shown.items())
        return replace(own, variant=own.variant + ending)

    return [replace(row, identity=named(row.identity)) for row in rows]


def _differs(column: str, identities: Sequence[Identity]) -> bool:
    return len({getattr(own, column) for own in identities}) > 1


def to_rows(summed: Iterable[Figure]) -> list[ResultRow]:
    """The figures as rows of results.csv: seed `all`, num_samples counting the seeds with a value, no single run."""
    return [ResultRow(identity=_identity(figure), measurement=_measurement(figure)) for figure in summed]


def _figure(group: list[ResultRow], shared: Mapping[str, Mapping[str, str]]) -> Figure:
    """The figure of rows that differ in their seed alone."""
    by_seed = _by_seed(group)
    first, measurements = group[0], {seed: row.measurement for seed, row in by_seed.items()}
    measured = [measurement for measurement in measurements.values() if measurement.status == "ok"]
    mean, low, high = _over_seeds(measured)
    item_low, item_high = _over_items(measured)
    wishes = first.measurement.settings.get("not_applicable")
    rates = {seed: measurement.settings.get("learning_rate") for seed, measurement in measurements.items()}
    return Figure(
        experiment=_joined(row.identity.experiment for row in group),
        variant=first.identity.variant,
        names=(first.identity.variant, *_also(first.identity, shared)),
        evaluation=first.identity.evaluation,
        metric=first.measurement.metric,
        unit=first.measurement.unit,
        settings=axes(first.measurement.settings),
        values={seed: entry.value for seed, entry in measurements.items() if entry.value is not None},
        mean=mean,
        low=low,
        high=high,
        item_low=item_low,
        item_high=item_high,
        num_samples=_fewest([measurement.num_samples for measurement in measured]),
        statuses=dict(Counter(measurement.status for measurement in measurements.values())),
        reason=next((entry.reason for entry in measurements.values() if entry.status != "ok"), ""),
        learning_rates={seed: rate for seed, rate in rates.items() if rate is not None},
        not_applicable=tuple(map(str, wishes)) if isinstance(wishes, list) else (),
        device=_joined(row.identity.device for row in group),
        corpus=first.identity.corpus,
        environments=frozenset(row.identity.environment for row in group),
        commits=frozenset(row.identity.commit for row in group),
        **{name: _alike(group, name) for name in ALIKE},
    )


def _also(identity: Identity, shared: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [name for name, first in shared.get(identity.evaluation, {}).items() if first == identity.variant]


def _by_seed(group: Sequence[ResultRow]) -> dict[int, ResultRow]:
    found: dict[int, ResultRow] = {}
    for row in group:
        seed, run = row.identity.seed, row.identity.run
        if not isinstance(seed, int):
            raise UserError(f"{_what(row)}: a row over seeds ({seed}) cannot be summed up again; give the runs' own")
        if seed in found:
            raise UserError(
                f"{_what(row)}: seed {seed} was measured twice, in {found[seed].identity.run} and in {run}; "
                "leave one of them out, or give their variants different names"
            )
        found[seed] = row
    return found


def _alike(group: Sequence[ResultRow], name: str) -> Any:
    """What all rows have in the column `name`; rows that do not say (None) agree with any."""
    runs = {getattr(row.identity, name): row.identity.run for row in group}
    if len(runs) > 1:
        runs.pop(None, None)
    if len(runs) > 1:
        places = ", ".join(f"{value} in {run}" for value, run in runs.items())
        raise UserError(f"{_what(group[0])}: its seeds differ in {name} ({places}) and have no common mean")
    return next(iter(runs))


def _over_seeds(measured: Sequence[Measurement]) -> tuple[float | None, float | None, float | None]:
    values = [entry.value for entry in measured if entry.value is not None]
    if not values:
        return None, None, None
    if len(values) == 1:
        return values[0], measured[0].low, measured[0].high
    interval = mean_interval(values)
    return interval.mean, interval.low, interval.high


def _over_items(measured: Sequence[Measurement]) -> tuple[float | None, float | None]:
    """Each seed draws its own test items, so the items of all seeds are one large sample."""
    samples = [
        (entry.value, entry.num_samples)
        for entry in measured
        if entry.metric.endswith("accuracy") and entry.value is not None and 0 <= entry.value <= 1 and entry.num_samples
    ]
    if not samples or len(samples) < len(measured):
        return None, None
    num_items = sum(count for _, count in samples)
    return proportion_interval(sum(rate * count for rate, count in samples) / num_items, num_items)


def _fewest(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _what(row: ResultRow) -> str:
    where = ", ".join(f"{name}={value}" for name, value in axes(row.measurement.settings).items())
    return f"{row.identity.evaluation} {row.measurement.metric} of {row.identity.variant}" + (
        f" at {where}" * bool(where)
    )


def _identity(figure: Figure) -> Identity:
    return Identity(
        experiment=figure.experiment,
        run="",
        mixer=figure.mixer,
        variant=figure.variant,
        backend=figure.backend,
        model=figure.model,
        parameters=figure.parameters,
        seq_len=figure.seq_len,
        evaluation=figure.evaluation,
        seed=ALL_SEEDS,
        precision=figure.precision,
        device=figure.device,
        num_devices=figure.num_devices,
        environment=_joined(sorted(figure.environments)),
        commit=_joined(sorted(figure.commits)),
        corpus=figure.corpus,
        config_hash="",
    )


def _measurement(figure: Figure) -> Measurement:
    """A mean over some of the seeds says in its reason what became of the others."""
    num_seeds, reason = sum(figure.statuses.values()), figure.reason
    if figure.values and len(figure.values) < num_seeds:
        reason = f"over {len(figure.values)} of {num_seeds} seeds: {reason}"
    return Measurement(
        metric=figure.metric,
        value=figure.mean,
        unit=figure.unit,
        settings=figure.settings,
        low=figure.low,
        high=figure.high,
        num_samples=len(figure.values),
        status="ok" if figure.values else next(iter(figure.statuses)),
        reason=reason,
    )
