"""Variants beside each other, over their seeds: a line a variant, and a few headline columns an evaluation.

The door to what a report or a plan needs of it: rows become figures, figures families, and both the summary.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnbench.results.tables import Table, TableCell, format_interval, format_number
from attnbench.verdict.ranking import TEST_OF_BEST, Family, Score, families, score_of
from attnbench.verdict.seeds import PER_RUN, Figure, figures, place_of, same_models, to_rows

__all__ = [
    "PER_RUN", "SUMMARY", "Column", "Entry", "Family", "Figure", "Headline", "Score", "Summary",
    "families", "figures", "headline", "same_models", "score_of", "summary", "summary_table", "to_rows",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Which settings of a metric become columns of the summary."""

    metric: str
    header: str
    higher_is_better: bool | None
    """None where nobody said."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Only settings that contain these."""
    axes: tuple[str, ...] = ()
    """Settings that order the columns, the first weighing most."""
    pick: str = "each"
    """each | largest | smallest by the axes, of the settings that most variants have a number at."""
    label: tuple[str, ...] = ()
    """Settings whose values stand in the header."""


def _largest(
    metric: str,
    header: str,
    *axes: str,
    label: tuple[str, ...] = (),
    higher_is_better: bool = False,
    settings: dict[str, Any] | None = None,
) -> Headline:
    """The metric at the largest size; the header names the first of the axes if nothing else."""
    return Headline(
        metric=metric,
        header=header,
        higher_is_better=higher_is_better,
        settings=settings or {},
        axes=axes,
        pick="largest",
        label=label or axes[:1],
    )


SHAPE = ("sequence_length", "head_width")

SUMMARY: dict[str, tuple[Headline, ...]] = {
    "training": (Headline(metric="tokens_per_second", header="training token/s", higher_is_better=True),),
    "throughput": (_largest("tokens_per_second", "token/s", "sequence_length", "batch_size", higher_is_better=True),),
    "memory": (_largest("training_peak_mib", "training MiB", "sequence_length", "batch_size"),),
    "inference": (
        _largest(
            "decode_tokens_per_second",
            "decode token/s",
            "cache_length",
            "batch_size",
            label=("cache_length", "batch_size"),
            higher_is_better=True,
        ),
    ),
    "attention": (
        _largest("forward_milliseconds", "forward ms", *SHAPE, label=SHAPE),
        _largest("backward_milliseconds", "backward ms", *SHAPE, label=SHAPE),
    ),
    "flash_vs_textbook": (_largest("total_milliseconds", "forward and backward ms", *SHAPE, label=SHAPE),),
    "grid": (_largest("forward_milliseconds", "forward ms", *SHAPE, "batch_size", "num_heads", label=SHAPE),),
    "models": (
        Headline(
            metric="total_milliseconds", header="forward and backward ms", higher_is_better=False, label=("size",)
        ),
    ),
    "decode": (
        _largest(
            "decode_milliseconds",
            "ms a position",
            "cache_length",
            "head_width",
            "batch_size",
            label=("cache_length", "head_width"),
            settings={"table": "position"},
        ),
        _largest(
            "tokens_per_second",
            "token/s of a text",
            "tokens",
            "batch_size",
            higher_is_better=True,
            settings={"table": "text", "form": "captured"},
        ),
    ),
    "profile": (
        _largest(
            "step_milliseconds",
            "ms a step",
            "sequence_length",
            label=("sequence_length", "form"),
            settings={"subject": "training step"},
        ),
        Headline(
            metric="forward_milliseconds",
            header="ms of attention",
            higher_is_better=False,
            settings={"subject": "attention"},
            axes=("sequence_length",),
            label=("sequence_length",),
        ),
    ),
    "copy": tuple(
        Headline(
            metric="symbol_accuracy", header="copy", higher_is_better=True, axes=("length",), label=("length",), **how
        )
        for how in (
            {"pick": "largest", "settings": {"beyond_training": False}},
            {"pick": "smallest", "settings": {"beyond_training": True}},
        )
    ),
    "recall": (
        Headline(
            metric="accuracy",
            header="recall",
            higher_is_better=True,
            axes=("sequence_length", "num_pairs", "width"),
            label=("sequence_length", "num_pairs"),
        ),
    ),
    "perplexity": (Headline(metric="perplexity", header="test PPL", higher_is_better=False, settings=TEST_OF_BEST),),
    "scaling": (_largest("step_milliseconds", "ms a step", "model"),),
}
"""By evaluation. One that is not named here gets a column of its first metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric at one setting."""

    evaluation: str
    metric: str
    settings: dict[str, Any]
    header: str
    unit: str
    higher_is_better: bool | None

    def takes(self, figure: Figure) -> bool:
        """Whether the figure belongs into this column."""
        return (figure.evaluation, figure.metric, figure.settings) == (self.evaluation, self.metric, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one variant has in one column."""

    text: str
    """The number, what became of it instead, or a dash where nothing was measured."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    status: str = ""
    """ok where there is a number, else the first status of its seeds; empty where nothing was measured."""
    is_best: bool = False
    is_exploratory: bool = False
    """The column is ranked, and has too few seeds for it."""
    without: str = ""
    """Words for what the mixer did not get of the evaluation's settings, having none of the name; or nothing."""

    def to_cell(self, *, with_interval: bool = False) -> TableCell:
        """Make the cell of a table, with the interval if asked for."""
        interval = format_interval(self.low, self.high) if with_interval else ""
        notes = tuple(filter(None, (interval, self.without)))
        return TableCell(text=self.text, notes=notes, mark="best" if self.is_best else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A line a variant; the first cell is its name."""

    headers: list[str]
    columns: list[Column]
    """What stands behind the headers after the first."""
    lines: list[list[Entry]]


def summary(summed: Sequence[Figure], ranked: Sequence[Family], variants: Iterable[str] = ()) -> Summary:
    """The summary of all evaluations that `summed` has, in its order.

    Args:
        variants: that have a line whatever was measured of them, in this order; others that `summed` has follow.
    """
    evaluations = dict.fromkeys(figure.evaluation for figure in summed)
    columns = [column for evaluation in evaluations for column in headline(summed, evaluation)]
    lines = []
    for variant in dict.fromkeys([*variants, *(figure.variant for figure in summed)]):
        own = [figure for figure in summed if variant in figure.names]
        lines.append([Entry(text=variant), *(_cell(own, column, ranked) for column in columns)])
    return Summary(headers=["variant", *(column.header for column in columns)], columns=columns, lines=lines)


def summary_table(content: Summary, *, with_intervals: bool = False) -> Table:
    """Make the table of a line a score and a column a variant."""
    lines = [
        [header, *(line[index].to_cell(with_interval=with_intervals) for line in content.lines)]
        for index, header in enumerate(content.headers[1:], start=1)
    ]
    return Table(headers=["", *(line[0].text for line in content.lines)], lines=lines)


def headline(summed: Sequence[Figure], evaluation: str) -> list[Column]:
    """The columns that the summary shows of an evaluation; none where it has no figures."""
    own = [figure for figure in summed if figure.evaluation == evaluation]
    if not own:
        return []
    return [column for choice in SUMMARY.get(evaluation) or _default(own) for column in _columns(own, choice)]


def _default(own: Sequence[Figure]) -> tuple[Headline, ...]:
    """The first metric that is ok everywhere, or else the first, at the first setting that most variants have.

    Of test data where there are any: what validation data give chooses, and is no score.
    """
    settings = {"split": "test"} if any(figure.settings.get("split") == "test" for figure in own) else {}
    own = [figure for figure in own if settings.items() <= figure.settings.items()]
    metrics = list(dict.fromkeys(figure.metric for figure in own))
    failed = {figure.metric for figure in own if figure.statuses.keys() - {"ok"}}
    metric = next((name for name in metrics if name not in failed), metrics[0])
    header, score = f"{own[0].evaluation} {metric}", score_of(metric)
    better = score.higher_is_better if score else None
    return (Headline(metric=metric, header=header, higher_is_better=better, settings=settings, pick="largest"),)


def _columns(own: Sequence[Figure], choice: Headline) -> list[Column]:
    found: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in own:
        if figure.metric == choice.metric and choice.settings.items() <= figure.settings.items():
            found.setdefault(place_of(figure.evaluation, figure.metric, figure.settings), []).append(figure)
    groups = list(found.values())
    if choice.pick != "each" and groups:
        most = max(sum(bool(figure.values) for figure in group) for group in groups)
        groups = [group for group in groups if sum(bool(figure.values) for figure in group) == most]
        pick = max if choice.pick == "largest" else min
        groups = [pick(groups, key=lambda group: _sizes(group[0].settings, choice.axes))]
    else:
        groups.sort(key=lambda group: _sizes(group[0].settings, choice.axes))
    return [
        Column(
            evaluation=group[0].evaluation,
            metric=choice.metric,
            settings=group[0].settings,
            header=_header(group[0].settings, choice, [other[0].settings for other in groups]),
            unit=group[0].unit,
            higher_is_better=choice.higher_is_better,
        )
        for group in groups
    ]


def _sizes(settings: dict[str, Any], names: Sequence[str]) -> list[float]:
    """The settings as numbers to order by: a text by the number it starts with (27m), all else before any number."""
    return [_size(settings.get(name)) for name in names]


def _size(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    number = re.match(r"\d+(\.\d+)?", value) if isinstance(value, str) else None
    return float(number[0]) if number else -math.inf


def _header(settings: dict[str, Any], choice: Headline, others: Sequence[dict[str, Any]]) -> str:
    """The headline's own words, the values of its labels, and whatever else tells its columns apart."""
    labels = [str(settings[name]) for name in choice.label if name in settings]
    words = [f"{choice.header} at {', '.join(labels)}" if labels else choice.header]
    for name, value in settings.items():
        # Chance levels follow from the other settings.
        is_told = name in choice.label or name.startswith("chance")
        if not is_told and any(other.get(name) != value for other in others):
            words.append(f"{name} {value}")
    return ", ".join(words)


def _cell(own: Sequence[Figure], column: Column, ranked: Sequence[Family]) -> Entry:
    figure = next((figure for figure in own if column.takes(figure)), None)
    if figure is None:
        return Entry(text="–")
    num_seeds = sum(figure.statuses.values())
    if figure.mean is None:
        status = next(iter(figure.statuses))
        return Entry(text=status.replace("_", " "), status=status, without=figure.without)
    partly = f" ({len(figure.values)} of {num_seeds} seeds)" if len(figure.values) < num_seeds else ""
    family = next((family for family in ranked if figure in family.figures), None)
    return Entry(
        text=format_number(figure.mean) + partly,
        value=figure.mean,
        low=figure.low,
        high=figure.high,
        status="ok",
        is_best=family is not None and family.best == figure.variant,
        is_exploratory=family is not None and family.exploratory,
        without=figure.without,
    )
