"""Charts of the differences between variants and the reference, with intervals."""

import math
from collections.abc import Sequence

from attnbench.report.blocks import Note, Picture, Pictures, Section, file_name
from attnbench.report.charts.marks import Datum
from attnbench.report.charts.vega import draw_bounds
from attnbench.report.sections import words
from attnbench.results.numbers import percent_of_nats, without_rounding
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict, common_reference

FEWEST = 3
"""Fewest variants, without the reference, for a chart."""

GAP = 8


def difference_section(verdicts: Sequence[Verdict]) -> Section | None:
    reference = common_reference(verdicts)
    if reference is None:
        return None
    # Infinite differences are in the sentences only.
    drawn = [it for it in verdicts if it.difference is not None and all(map(math.isfinite, _ends(it)))]
    by_evaluation = grouped(drawn, lambda it: it.pair.evaluation)
    shown = [_picture(reference, group) for group in by_evaluation.values() if len(group) >= FEWEST]
    about = (
        "A line is the interval of a variant’s difference at its Holm level; it excludes 0, the dashed line, if one of "
        "the two is better. The upright ticks are the margin within which two are equivalent, which is tested "
        "separately."
    )
    title = f"Differences from {reference}"
    return Section(title=title, blocks=[Note(about), Pictures(shown)]) if shown else None


def _picture(reference: str, verdicts: Sequence[Verdict]) -> Picture:
    primary, evaluation = verdicts[0].pair.primary, verdicts[0].pair.evaluation
    is_nats = primary.kind == "nats"
    # The best variant comes first.
    ordered = sorted(verdicts, key=lambda it: without_rounding(it.difference or 0.0) * (1 if is_nats else -1))
    metric = "perplexity" if is_nats else words.metric_name(primary.metric)
    title = f"{words.heading(evaluation)}: {metric} less {reference}’s{', %' if is_nats else ''}"
    description = " ".join(words.verdict_sentence(verdict) for verdict in ordered)
    return Picture(
        name=file_name("differences", evaluation),
        title=title,
        spec=draw_bounds([datum for it in ordered for datum in _data(it)], description, gap=GAP, level=0.0),
        description=description,
        legend=words.where({name: value for name, value in verdicts[0].pair.settings.items() if name != "split"}),
    )


def _data(verdict: Verdict) -> list[Datum]:
    label, (value, low, high, *limits) = verdict.pair.first, _ends(verdict)
    figure = {"variant": label, "value": value, "low": low, "high": high, "text": words.verdict_sentence(verdict)}
    return [figure, *({"variant": label, "limit": limit} for limit in limits)]


def _ends(verdict: Verdict) -> list[float]:
    margin, is_nats = verdict.pair.primary.margin, verdict.pair.primary.kind == "nats"
    ends = [value for value in (verdict.difference, verdict.low, verdict.high, -margin, margin) if value is not None]
    return list(map(percent_of_nats, ends)) if is_nats else ends
