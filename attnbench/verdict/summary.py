"""Variants in a table of headline columns: the `headline` of an evaluation's class; without one, its first metric."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnbench.results.corpora import on_corpus, split_name
from attnbench.results.metrics import Primary
from attnbench.results.rows import TRAINING
from attnbench.results.tables import Headline
from attnbench.settings.registry import own_targets, resolve
from attnbench.verdict.axes import grouped, is_chance
from attnbench.verdict.family import family, solved_beside
from attnbench.verdict.ranking import Verdict, judge, judge_in_looks
from attnbench.verdict.seeds import RATIO_NOTE, Figure

OF_TRAINING = (Headline("tokens_per_second", "training token/s", higher_is_better=True, pick="each"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    evaluation: str
    metric: str
    settings: dict[str, Any]
    place: dict[str, Any]
    """See `Figure.place`."""
    header: str
    unit: str
    higher_is_better: bool | None
    judged_by: str
    """Primary metric whose verdicts mark the column."""

    def takes(self, figure: Figure) -> bool:
        return (figure.evaluation, figure.metric, figure.settings) == (self.evaluation, self.metric, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    figure: Figure | None = None
    verdict: Verdict | None = None
    """Verdict on the variant against the reference, in columns of primary metrics; None without a reference."""
    is_best: bool = False
    solved: str = ""
    """Seeds that solve the task, "12 of 12 solved", if this score decides it."""

    @property
    def is_solved(self) -> bool:
        """All seeds solve the task, or it is unknown how many do."""
        return len({*self.solved.removesuffix(" solved").split(" of ")}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    columns: list[Column]
    lines: dict[str, list[Entry]]

    @property
    def ratio_notes(self) -> list[str]:
        found = [it.figure for line in self.lines.values() for it in line if it.figure]
        return [RATIO_NOTE] if any(figure.ratio_text for figure in found) else []


def summary(figures: Sequence[Figure], verdicts: Sequence[Verdict], variants: Iterable[str] = ()) -> Summary:
    """`variants` have a line even without figures."""
    evaluations = dict.fromkeys(figure.evaluation for figure in figures)
    columns = [column for evaluation in evaluations for column in headline_columns(figures, evaluation)]
    lines, primaries = {}, primary_metrics(evaluations)
    for variant in dict.fromkeys([*variants, *(figure.variant for figure in figures)]):
        measured = [figure for figure in figures if variant in figure.names]
        lines[variant] = [_entry(measured, column, verdicts, primaries.get(column.evaluation)) for column in columns]
    return Summary(columns=columns, lines=lines)


def _entry(figures: Sequence[Figure], column: Column, verdicts: Sequence[Verdict], primary: Primary | None) -> Entry:
    figure = next((figure for figure in figures if column.takes(figure)), None)
    if figure is None or figure.mean is None:
        return Entry(figure=figure)
    tested = [verdict for verdict in verdicts if _is_of(verdict, column)]
    with_it = [verdict for verdict in tested if figure.variant in (verdict.pair.first, verdict.pair.second)]
    has_reference = len({verdict.pair.second for verdict in tested}) == 1
    against = next((it for it in with_it if has_reference and it.pair.first == figure.variant), None)
    won = {verdict.winner for verdict in with_it} == {figure.variant}
    others = {name for verdict in tested for name in (verdict.pair.first, verdict.pair.second)} - {figure.variant}
    is_best = won and len(with_it) == len(others)
    return Entry(figure=figure, verdict=against, is_best=is_best, solved=_solved(figure, figures, primary))


def _solved(figure: Figure, figures: Sequence[Figure], primary: Primary | None) -> str:
    of_it = [it for it in figures if it.evaluation == figure.evaluation]
    solved = solved_beside(figure, primary, of_it) if primary is not None else None
    return f"{sum(solved.values.values()):.0f} of {len(solved.values)} solved" if solved and solved.values else ""


def _is_of(verdict: Verdict, column: Column) -> bool:
    pair = verdict.pair
    # Chance levels differ with the metric.
    judged, shown = (
        {name: value for name, value in of.settings.items() if not is_chance(name)} for of in (pair, column)
    )
    return (pair.evaluation, pair.primary.metric, judged) == (column.evaluation, column.judged_by, shown)


def verdicts_of(
    figures: Sequence[Figure],
    *,
    rank: Sequence[str],
    reference: str | None,
    primaries: Mapping[str, Primary] | None = None,
    in_looks: bool = False,
) -> list[Verdict]:
    if primaries is None:
        primaries = primary_metrics(figure.evaluation for figure in figures)
    pairs = family(figures, rank=rank, reference=reference, primaries=primaries)
    return judge_in_looks(pairs) if in_looks else judge(pairs)


def primary_metrics(evaluations: Iterable[str]) -> dict[str, Primary]:
    primaries = {name: getattr(evaluation_class(name), "primary", None) for name in dict.fromkeys(evaluations)}
    return {name: primary for name, primary in primaries.items() if primary is not None}


def headline_columns(figures: Sequence[Figure], evaluation: str) -> list[Column]:
    """If nothing was measured at the settings of its headlines, a measured metric has a column; not so for trainings,
    whose other rows are not scores."""
    figures = [figure for figure in figures if figure.evaluation == evaluation]
    if not figures:
        return []
    measured, corpus = split_name(evaluation)
    headlines = OF_TRAINING if measured == TRAINING else getattr(evaluation_class(evaluation), "headline", ())
    columns = [column for headline in headlines for column in _columns(figures, headline)]
    if not columns and measured != TRAINING:
        columns = _columns(figures, _default(figures))
    return [replace(column, header=on_corpus(column.header, corpus)) for column in columns]


def evaluation_class(name: str) -> Any:
    name, _ = split_name(name)
    # Looked up among existing files, because the name comes from rows.
    target = {**own_targets("bench"), **own_targets("eval")}.get(name)
    return None if target is None else resolve(target, object)


def _default(figures: Sequence[Figure]) -> Headline:
    """Choose the first metric that is ok everywhere, or the first, on test data if possible."""
    settings = {"split": "test"} if any(figure.settings.get("split") == "test" for figure in figures) else {}
    figures = [figure for figure in figures if settings.items() <= figure.settings.items()]
    metrics = list(dict.fromkeys(figure.metric for figure in figures))
    failed = {figure.metric for figure in figures if figure.statuses.keys() - {"ok"}}
    metric = next((name for name in metrics if name not in failed), metrics[0])
    better = True if metric.endswith("accuracy") else None
    return Headline(metric, f"{figures[0].evaluation} {metric}", higher_is_better=better, settings=settings)


def _columns(figures: Sequence[Figure], headline: Headline) -> list[Column]:
    taken = [it for it in figures if it.metric == headline.metric and headline.settings.items() <= it.settings.items()]
    by_key = grouped(taken, lambda figure: figure.key)
    groups = sorted(by_key.values(), key=lambda group: _sizes(group[0].settings, headline.axes))
    others = groups
    if headline.pick != "each" and groups:
        num_values = [sum(bool(figure.values) for figure in group) for group in groups]
        groups = [group for group, number in zip(groups, num_values, strict=True) if number == max(num_values)]
        pick = max if headline.pick == "largest" else min
        groups = [pick(groups, key=lambda group: _sizes(group[0].settings, headline.axes))]
        # Without axes, only the header can name the picked setting.
        others = groups if headline.axes else others
    return [
        Column(
            evaluation=group[0].evaluation,
            metric=headline.metric,
            settings=group[0].settings,
            place=group[0].place,
            header=_header(group[0].settings, headline, [other[0].settings for other in others]),
            unit=group[0].unit,
            higher_is_better=headline.higher_is_better,
            judged_by=headline.judged_by or headline.metric,
        )
        for group in groups
    ]


def _sizes(settings: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Numbers for sorting: texts by their leading number (27m), anything else before numbers."""
    return [_size(settings.get(name)) for name in names]


def _size(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    number = re.match(r"\d+(\.\d+)?", value) if isinstance(value, str) else None
    return float(number[0]) if number else -math.inf


def _header(settings: dict[str, Any], headline: Headline, others: Sequence[dict[str, Any]]) -> str:
    label = headline.axes[:1] if headline.label is None else headline.label
    labels = [str(settings[name]) for name in label if name in settings]
    # Chance levels depend on the other settings.
    unnamed = {name: value for name, value in settings.items() if name not in label and not is_chance(name)}
    told = [f"{name} {value}" for name, value in unnamed.items() if any(it.get(name) != value for it in others)]
    if headline.pick == "each" or labels:
        return ", ".join([f"{headline.header} at {', '.join(labels)}" if labels else headline.header, *told])
    return f"{headline.header} at {', '.join(told)}" if told else headline.header
