"""Charts of the differences between variants and the reference, with intervals."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from attnbench.report.blocks import Note, Picture, Pictures, Section, file_name
from attnbench.report.charts.marks import Datum
from attnbench.report.charts.pictures import bounds, seed_dots, seeds_legend
from attnbench.report.charts.vega import draw_bounds
from attnbench.report.sections import words
from attnbench.results.metrics import Primary
from attnbench.results.numbers import percent_of_nats, without_rounding
from attnbench.verdict.axes import grouped
from attnbench.verdict.family import primary_figures
from attnbench.verdict.ranking import Verdict, common_reference
from attnbench.verdict.seeds import Figure

USUAL = ("split", "checkpoint", "context")

GAP = 8

ABOUT = (
    "A line is the interval of a variant’s difference, adjusted for the number of tests; it excludes 0, the dashed "
    "line, if one of the two is better. The upright ticks are the margin, the largest difference that does not matter: "
    "that two variants are equivalent within it is tested separately."
)


def difference_section(
    verdicts: Sequence[Verdict], variants: Sequence[str] = (), *, without: Collection[str] = ()
) -> Section | None:
    """Draw all but the pictures `without`."""
    by_evaluation = grouped(verdicts, lambda it: it.pair.evaluation)
    pictures = [picture for group in by_evaluation.values() if (picture := difference_picture(group, variants))]
    shown = [picture for picture in pictures if picture.name not in without]
    reference = common_reference(verdicts)
    title = f"Differences from {reference}" if reference is not None else "Differences from the best"
    return Section(title=title, blocks=[Note(ABOUT), Pictures(shown)]) if shown else None


def difference_picture(verdicts: Sequence[Verdict], variants: Sequence[str]) -> Picture | None:
    """Differences are from the reference or, if all pairs are compared, from the best."""
    found = [it for it in verdicts if it.difference is not None]
    base = common_reference(verdicts) or _best(found)
    turned = [_turned(it) if it.pair.first == base else it for it in found if base in (it.pair.first, it.pair.second)]
    # Infinite differences are in the sentences only.
    drawn = [it for it in turned if all(map(math.isfinite, _ends(it)))]
    return _picture(base, drawn, variants) if base is not None and drawn else None


def _best(verdicts: Sequence[Verdict]) -> str | None:
    """The variant that is ahead of most others by its mean."""
    ahead: Counter[str] = Counter()
    for it in verdicts:
        is_first = ((it.difference or 0.0) > 0) == it.pair.primary.higher_is_better
        ahead[it.pair.first if is_first else it.pair.second] += 1
    return max(ahead, key=ahead.__getitem__, default=None)


def _turned(verdict: Verdict) -> Verdict:
    pair = verdict.pair
    assert verdict.difference is not None
    assert verdict.low is not None
    assert verdict.high is not None
    return replace(
        verdict,
        pair=replace(pair, first=pair.second, second=pair.first),
        outcome={"better": "worse", "worse": "better"}.get(verdict.outcome, verdict.outcome),
        difference=-verdict.difference,
        low=-verdict.high,
        high=-verdict.low,
    )


def _picture(base: str, verdicts: Sequence[Verdict], variants: Sequence[str]) -> Picture:
    primary, evaluation = verdicts[0].pair.primary, verdicts[0].pair.evaluation
    is_nats = primary.kind == "nats"
    # The best variant comes first.
    ordered = sorted(verdicts, key=lambda it: without_rounding(it.difference or 0.0) * (1 if is_nats else -1))
    metric = "perplexity" if is_nats else words.metric_name(primary.metric)
    name = words.capitalized(metric) if metric == evaluation else f"{words.heading(evaluation)}: {metric}"
    title = f"{name} less {base}’s{', %' if is_nats else ''}"
    description = " ".join(words.verdict_sentence(verdict) for verdict in ordered)
    data = [datum for it in ordered for datum in _data(it)]
    place = words.where({name: value for name, value in verdicts[0].pair.settings.items() if name not in USUAL})
    better = "← better" if is_nats else "better →"
    return Picture(
        name=file_name("differences", evaluation),
        title=title,
        spec=draw_bounds(data, description, gap=GAP, level=0.0, variants=variants),
        description=description,
        legend="; ".join(
            filter(None, (place, "dashed: no difference", f"orange ticks: the margin, {primary.margin_text}", better))
        ),
    )


def seed_picture(
    evaluation: str, primary: Primary, figures: Sequence[Figure], variants: Sequence[str]
) -> Picture | None:
    """Draw a dot for each seed of an evaluation that is not tested, and their mean."""
    of_it = [figure for figure in figures if figure.evaluation == evaluation]
    shown_metric = "perplexity" if primary.kind == "nats" else primary.metric
    shown = replace(primary, metric=shown_metric)
    scores = [*primary_figures(of_it, shown, [figure.variant for figure in of_it]).values()]
    drawn = words.by_mean([it for it in scores if it.mean is not None], descending=primary.higher_is_better)
    if not drawn:
        return None
    name = words.score_name(evaluation, shown_metric).removesuffix(" (%)")
    place = words.where({name: value for name, value in drawn[0].settings.items() if name not in USUAL})
    data: list[Datum] = []
    for it in drawn:
        low, high = bounds(it)
        data.append({"variant": it.label, "value": it.mean, "low": low, "high": high, "text": words.outcome(it)})
        data += [{"variant": it.label, "dot": dot["value"]} for dot in seed_dots(it, 0)]
    description = f"{name}: {'; '.join(f'{it.label} {words.outcome(it)}' for it in drawn)}."
    better = "better →" if primary.higher_is_better else "← better"
    return Picture(
        name=file_name("seeds", evaluation),
        title=words.capitalized(name),
        spec=draw_bounds(data, description, gap=GAP, variants=variants),
        description=description,
        legend="; ".join(filter(None, (place, *seeds_legend(drawn, "lines"), better))),
    )


def _data(verdict: Verdict) -> list[Datum]:
    label, (value, low, high, *limits) = verdict.pair.first, _ends(verdict)
    figure = {"variant": label, "value": value, "low": low, "high": high, "text": words.verdict_sentence(verdict)}
    return [figure, *({"variant": label, "limit": limit} for limit in limits)]


def _ends(verdict: Verdict) -> list[float]:
    margin, is_nats = verdict.pair.primary.margin, verdict.pair.primary.kind == "nats"
    ends = [value for value in (verdict.difference, verdict.low, verdict.high, -margin, margin) if value is not None]
    return list(map(percent_of_nats, ends)) if is_nats else ends
