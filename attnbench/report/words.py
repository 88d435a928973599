"""Names, numbers and sentences as a reader meets them. Text in, text out; no HTML."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.results.tables import format_number
from attnbench.verdict.ranking import Family
from attnbench.verdict.seeds import PER_RUN, Figure
from attnbench.verdict.summary import Column

NAMES = {
    "steps_to_95": "steps to 95 %",
    "forward_flops_per_token": "forward FLOPs per token",
    "achieved_tflops": "achieved TFLOP/s",
    "part_share": "share of a step's time",
}
UNITS_IN_NAMES = {"_mib": " (MiB)", "_milliseconds": " time (ms)", "_seconds": " time (s)", "_bytes": " (bytes)"}


def metric_name(metric: str, unit: str = "") -> str:
    """Write `training_peak_mib` as "training peak (MiB)"."""
    if metric in NAMES:
        return NAMES[metric]
    for ending, shown in UNITS_IN_NAMES.items():
        if metric.endswith(ending):
            return metric.removesuffix(ending).replace("_", " ") + shown
    name = metric.replace("_", " ")
    return name if unit in ("", "1") or "_per_" in metric else f"{name} ({unit})"


def heading(evaluation: str) -> str:
    """Write `weight_memory` as "Weight memory"."""
    return capitalized(evaluation.replace("_", " "))


def axis_name(axis: str) -> str:
    """Write `num_pairs` as "pairs"."""
    return axis.removeprefix("num_").replace("_", " ")


def shown_value(value: Any) -> str:
    """Write a setting's value, numbers with four digits or thousands separated."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return str(value)


def is_chance(name: str) -> bool:
    """Tell if a setting is a level to compare with, and no axis."""
    return name == "chance" or name.startswith("chance_")


def chance_level(level: float) -> str:
    """Write the number, or that it is next to nothing, as for a whole string of symbols."""
    return "below 0.0001" if 0 < level < 1e-4 else shown_value(level)


def chances(settings: dict[str, Any]) -> str:
    """List every level that luck would reach: "chance 0.0002441, among pairs 0.0625"; empty where there is none."""
    levels = {name: chance_level(value) for name, value in settings.items() if is_chance(name)}
    return ", ".join(f"{name.removeprefix('chance_').replace('_', ' ')} {level}" for name, level in levels.items())


def where(settings: dict[str, Any]) -> str:
    """Write settings as "sequence length 256, pairs 16"; empty where there is nothing to say."""
    names = [name for name in settings if not is_chance(name) and name not in PER_RUN]
    return ", ".join(_setting(name, settings[name]) for name in names if settings[name] is not False)


def _setting(name: str, value: Any) -> str:
    """Write one setting; a true one is named alone, as in "beyond training"."""
    if value is True:
        return axis_name(name)
    if name in ("split", "checkpoint"):
        return f"{value} {name}"
    return f"{axis_name(name)} {shown_value(value)}"


def interval(low: float | None, high: float | None) -> str:
    """Write an interval in brackets; empty where there is none, or where it has no width."""
    return f"[{format_number(low)}, {format_number(high)}]" if low is not None and high is not None else ""


def interval_name(figures: Sequence[Figure]) -> str:
    """Name the kind of interval that these figures have."""
    return "95 % interval" if any(len(figure.values) > 1 for figure in figures) else "the measurement's own interval"


def status_name(status: str) -> str:
    """Write `out_of_memory` as "out of memory"."""
    return status.replace("_", " ")


def without_addresses(text: str) -> str:
    """Strip network addresses: a library's error may name its manual, and a report names no address."""
    return re.sub(r"\s*\(?https?://\S+", "", text)


def outcome(figure: Figure) -> str:
    """Write the figure's number, or its statuses."""
    return format_number(figure.mean) if figure.mean is not None else " and ".join(map(status_name, figure.statuses))


def listed(words: Iterable[str], last: str = "and") -> str:
    """Join words as "a, b and c"."""
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def ranked_answer(family: Family) -> str:
    """Write one sentence on a ranked metric; it names a best variant only where the comparisons separated it."""
    ordered = _by_mean(family.figures, descending=family.higher_is_better)
    shown = [f"{figure.label} {outcome(figure)}" for figure in ordered]
    opening = _opening(family.settings)
    what = metric_name(family.metric)
    if family.exploratory:
        return f"{opening}{what} is {listed(shown)}: exploratory, too few seeds to rank."
    if family.best is not None:
        others = listed(text for figure, text in zip(ordered, shown, strict=True) if figure.variant != family.best)
        winner = next(figure for figure in ordered if figure.variant == family.best)
        return f"{opening}{winner.label} has the best {what}, {outcome(winner)}, separated from {others}."
    leader = ordered[0].variant
    apart = [
        pair.second if pair.first == leader else pair.first
        for pair in family.comparisons
        if pair.is_separated and leader in (pair.first, pair.second)
    ]
    label = ordered[0].label
    ending = f"{label} is separated from {listed(apart)} only" if apart else f"{label} is separated from none"
    return f"{opening}no variant is best in {what}: {listed(shown)}; {ending}."


def tally(families: Sequence[Family]) -> str:
    """Count how often each variant is best over all settings of a metric; empty for fewer than two ranked ones."""
    ranked = [family for family in families if not family.exploratory]
    if len(ranked) < 2:
        return ""
    wins = {name: sum(family.best == name for family in ranked) for name in dict.fromkeys(f.best for f in ranked)}
    words = [f"{name} is best at {count}" for name, count in wins.items() if name is not None]
    nobody = wins.get(None, 0)
    words += [f"no variant at {nobody}" if words else "no variant is best at any"] if nobody else []
    return f"Over all {len(ranked)} settings of {metric_name(ranked[0].metric)}, {listed(words)}."


def overall(families: Sequence[Family]) -> str:
    """Write one sentence on several ranked scores: how many each variant is best at."""
    ranked = [family for family in families if not family.exploratory]
    if not ranked:
        return "Nothing is ranked: no score that ranks was measured with enough seeds. The numbers stand as they are."
    wins = {name: sum(f.best == name for f in ranked) for name in dict.fromkeys(f.best for f in ranked)}
    words = [f"{name} is best at {count}" for name, count in wins.items() if name is not None]
    if not words:
        scores = f"any of the {len(ranked)} ranked scores" if len(ranked) > 1 else "the one ranked score"
        return f"At {scores} no variant is separated from all others."
    if None in wins:
        words.append(f"at {wins[None]} no variant is separated from all others")
    scores = f"the {len(ranked)} ranked scores" if len(ranked) > 1 else "the one ranked score"
    return f"Of {scores}, {listed(words)}."


def plain_answer(figures: Sequence[Figure], column: Column) -> str:
    """Write one sentence on a metric that nobody ranks, such as a timing."""
    own = [figure for figure in figures if column.takes(figure)]
    ordered = _by_mean(own, descending=column.higher_is_better is not False)
    shown = listed(f"{figure.label} {outcome(figure)}" for figure in ordered)
    return f"{_opening(column.settings)}{metric_name(column.metric, column.unit)} is {shown}; measured, not ranked."


def capitalized(text: str) -> str:
    """Make the first letter large and leave the others as they are."""
    return text[:1].upper() + text[1:]


def _opening(settings: dict[str, Any]) -> str:
    usual = {"split": "test", "checkpoint": "best"}
    text = where({name: value for name, value in settings.items() if usual.get(name) != value})
    return f"At {text}, " if text else ""


def _by_mean(figures: Sequence[Figure], *, descending: bool) -> list[Figure]:
    """Sort figures with a number in order, the others behind them."""
    sign = -1 if descending else 1
    return sorted(figures, key=lambda figure: (figure.mean is None, sign * (figure.mean or 0)))
