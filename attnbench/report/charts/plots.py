"""The plots of an evaluation, and the figures of each."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.report.blocks import file_name
from attnbench.report.sections import words
from attnbench.results.corpora import split_name
from attnbench.verdict.axes import grouped, is_chance
from attnbench.verdict.seeds import Figure

TOKENS = "tokens_per_step"
"""Product of sequence length and batch size, for series at constant tokens, in which both vary."""


BUCKET = re.compile(r"[0-9]{1,9}-([0-9]{1,9})")

LENGTHS = ("length", "sequence_length", "position_bucket", "training_lengths")
"""Axes on which a trained length has a place."""

WHOLES = {"part_share": "part"}
BUDGETS = ("parameters", "forward_flops_per_token")
"""Metrics of a model's size rather than its performance; they have a separate table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    name: str
    """File name: <evaluation>-<metric>-<axis>, and fixed settings if they distinguish plots."""
    metric: str
    unit: str
    axis: str
    fixed: dict[str, Any]
    """Settings that distinguish plots of this metric and axis."""
    figures: list[Figure]

    @property
    def positions(self) -> list[Any]:
        values = list(dict.fromkeys(map(self.position, self.figures)))
        return sorted(values) if all(map(_is_number, values)) else values

    def position(self, figure: Figure) -> Any:
        """A bucket "4-7" is at its end, counted from 1."""
        value = _along(figure, self.axis)
        bucket = BUCKET.fullmatch(value) if self.axis == "position_bucket" and isinstance(value, str) else None
        return int(bucket[1]) + 1 if bucket else value

    @property
    def is_numeric(self) -> bool:
        return all(map(_is_number, self.positions))

    @property
    def is_whole(self) -> bool:
        """A variant's values add up to 1 and are drawn as one bar of parts."""
        return WHOLES.get(self.metric) == self.axis

    @property
    def trained(self) -> float | None:
        """The longest trained length, where the plot has it and goes beyond it."""
        if self.axis not in LENGTHS or not self.is_numeric:
            return None
        beyond = [figure.settings.get("beyond_training") for figure in self.figures]
        if any(beyond):
            lengths = [self.position(it) for it, is_beyond in zip(self.figures, beyond, strict=True) if not is_beyond]
        elif self.axis == "training_lengths":
            lengths = [1]
        else:
            of_text = [it.identity for it in self.figures if split_name(it.evaluation)[0] == "perplexity"]
            lengths = [*{it.seq_len for it in of_text if it.seq_len is not None}]
            lengths = lengths if len(lengths) == 1 else []
        longest = max(lengths, default=math.inf)
        return longest if self.positions[0] <= longest < self.positions[-1] else None

    @property
    def title(self) -> str:
        name = words.capitalized(words.metric_name(self.metric, self.unit))
        along = f" by {words.axis_name(self.axis)}" if len(self.positions) > 1 else ""
        fixed = words.where(self.fixed)
        single = f"{words.axis_name(self.axis)} {words.shown_value(self.positions[0])}" if not along else ""
        return name + along + "".join(f", {word}" for word in (single, fixed) if word)

    @property
    def missing(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.mean is None]

    def chance(self) -> dict[Any, float]:
        """Empty for language models: on a scale with the unigram's nats their differences would vanish."""
        levels = ((self.position(figure), figure.settings.get("chance")) for figure in self.figures)
        return {position: level for position, level in levels if level is not None and level <= 1}


def plots_of(figures: Sequence[Figure], declared: Iterable[tuple[str, str]] | None) -> list[Plot]:
    """Choose the plots of one evaluation: of its `declared` (metric, axis) pairs or, if unknown, of each metric along
    its axis with most numbers."""
    pairs = declared if declared is not None else _pairs(figures)
    plots = [plot for metric, axis in pairs for plot in _plots(figures, metric, axis)]
    # Axes with a single value give equal plots: one of them is enough.
    metrics = {plot.metric for plot in plots if len(plot.positions) > 1}
    singles = {plot.metric: plot for plot in reversed(plots) if plot.metric not in metrics}
    return [plot for plot in plots if len(plot.positions) > 1 or plot is singles.get(plot.metric)]


def describe(plot: Plot) -> str:
    """For readers who cannot see the plot."""
    shown = sorted((f for f in plot.figures if f.mean is not None), key=_place_in(plot))
    by_variant = grouped(shown, lambda figure: figure.label)
    parts = []
    for variant, group in by_variant.items():
        if plot.is_whole:
            parts.append(
                f"{variant} {words.listed(f'{figure.settings[plot.axis]} {share(figure)}' for figure in group)}"
            )
            continue
        first, last = group[0], group[-1]
        text = f"{variant} {words.outcome(first)}"
        if first is not last:
            ends = [words.shown_value(plot.position(figure)) for figure in (first, last)]
            text += f" at {ends[0]} to {words.outcome(last)} at {ends[1]}"
        parts.append(text)
    missing = f" Without a number: {missing_text(plot)}." if plot.missing else ""
    return f"{plot.title}: {'; '.join(parts)}.{missing}"


def share(figure: Figure) -> str:
    return f"{100 * (figure.mean or 0):.0f} %"


def missing_text(plot: Plot) -> str:
    """Text such as "softmax out of memory at 16,384 and 32,768; linear diverged at 200"."""
    missing = sorted(plot.missing, key=_place_in(plot))
    groups = grouped(missing, lambda figure: (figure.label, words.outcome(figure)))
    return "; ".join(
        f"{variant} {what} at {words.listed(words.shown_value(plot.position(figure)) for figure in group)}"
        for (variant, what), group in groups.items()
    )


def chance_text(plot: Plot) -> str:
    levels = list(dict.fromkeys(plot.chance().values()))
    if not levels:
        return ""
    ends = dict.fromkeys(map(words.chance_level, (max(levels), min(levels))))
    return "chance " + " to ".join(ends)


def _place_in(plot: Plot) -> Any:
    order = {value: index for index, value in enumerate(plot.positions)}
    return lambda figure: order[plot.position(figure)]


def _pairs(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    values: dict[tuple[str, str], set[Any]] = {}
    for figure in figures:
        for axis, value in figure.settings.items():
            if _is_number(value) and not is_chance(axis) and figure.metric not in BUDGETS:
                values.setdefault((figure.metric, axis), set()).add(value)
    longest: dict[str, str] = {}
    for (metric, axis), values_of_axis in values.items():
        if len(values_of_axis) > len(values.get((metric, longest.get(metric, "")), {None})):
            longest[metric] = axis
    return list(longest.items())


def _plots(figures: Sequence[Figure], metric: str, axis: str) -> list[Plot]:
    """Return a plot for every combination of other settings at which the axis has several values.

    Without any, return one plot of all variants, for the best checkpoint's test split if possible.
    """
    shown = [figure for figure in figures if figure.metric == metric and axis in figure.settings]
    if not shown:
        return []
    names = _telling(shown, axis)
    if "context" in names:
        # Over all positions, the first of which have hardly a context, a plot would look alike; tables have both.
        shown = [figure for figure in shown if "context" in figure.settings]
        names = _telling(shown, axis)
    groups = _grouped(shown, names)
    several = [group for group in groups if _num_positions(group[1], axis) > 1]
    if axis == "sequence_length" and "batch_size" in names:
        at_constant_tokens = _grouped(shown, [TOKENS if name == "batch_size" else name for name in names])
        several += [group for group in at_constant_tokens if _num_positions(group[1], axis) > 1]
    if not several:
        several = [
            max(groups, key=lambda group: [group[1][0].settings.get(it) == usual for it, usual in words.USUAL.items()])
        ]
    return [
        Plot(
            name=file_name(shown[0].evaluation, metric, axis, settings=fixed if len(several) > 1 else {}),
            metric=metric,
            unit=shown[0].unit,
            axis=axis,
            fixed=fixed,
            figures=group,
        )
        for fixed, group in several
    ]


def _grouped(figures: Sequence[Figure], names: Sequence[str]) -> list[tuple[dict[str, Any], list[Figure]]]:
    groups: dict[str, tuple[dict[str, Any], list[Figure]]] = {}
    for figure in figures:
        settings = figure.settings
        if TOKENS in names:
            settings = {**settings, TOKENS: settings["sequence_length"] * settings["batch_size"]}
        fixed = {name: settings[name] for name in names if name in settings}
        groups.setdefault(json.dumps(fixed, sort_keys=True), (fixed, []))[1].append(figure)
    return list(groups.values())


def _num_positions(figures: Sequence[Figure], axis: str) -> int:
    return len({_along(figure, axis) for figure in figures})


def _along(figure: Figure, axis: str) -> Any:
    value = figure.settings[axis]
    return json.dumps(value) if isinstance(value, list | dict) else value


def _telling(figures: Sequence[Figure], axis: str) -> list[str]:
    """Return the settings that vary independently of the axis, unlike a batch size that depends on the length."""
    names = dict.fromkeys(name for figure in figures for name in figure.settings if name != axis)
    telling = []
    for name in names:
        values: dict[Any, set[str]] = {}
        for figure in figures:
            values.setdefault(_along(figure, axis), set()).add(json.dumps(figure.settings.get(name)))
        if not is_chance(name) and any(len(texts) > 1 for texts in values.values()):
            telling.append(name)
    return telling


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
