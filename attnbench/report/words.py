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
    """`training_peak_mib` as "training peak (MiB)"."""
    if metric in NAMES:
        return NAMES[metric]
    for ending, shown in UNITS_IN_NAMES.items():
        if metric.endswith(ending):
            return metric.removesuffix(ending).replace("_", " ") + shown
    name = metric.replace("_", " ")
    return name if unit in ("", "1") or "_per_" in metric else f"{name} ({unit})"


def heading(evaluation: str) -> str:
    """`weight_memory` as "Weight memory"."""
    return capitalized(evaluation.replace("_", " "))


def axis_name(axis: str) -> str:
    """`num_pairs` as "pairs"."""
    return axis.removeprefix("num_").replace("_", " ")


def shown_value(value: Any) -> str:
    """A setting's value, numbers with four digits or thousands separated."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return str(value)


def is_chance(name: str) -> bool:
    """Whether a setting is a level to compare with, and no axis."""
    return name == "chance" or name.startswith("chance_")


def chance_level(level: float) -> str:
    """The number, or that it is next to nothing, as for a whole string of symbols."""
    return "below 0.0001" if 0 < level < 1e-4 else shown_value(level)


def chances(settings: dict[str, Any]) -> str:
    """Every level that luck would reach: "chance 0.0002441, among pairs 0.0625"; empty where there is none."""
    levels = {name: chance_level(value) for name, value in settings.items() if is_chance(name)}
    return ", ".join(f"{name.removeprefix('chance_').replace('_', ' ')} {level}" for name, level in levels.items())


def place(settings: dict[str, Any]) -> str:
    """Where on the axes: "sequence length 256, pairs 16"; empty where there is nothing to say."""
    own = {name: value for name, value in settings.items() if not is_chance(name) and name not in PER_RUN}
    return ", ".join(_setting(name, value) for name, value in own.items() if value is not False)


def _setting(name: str, value: Any) -> str:
    """What holds is named alone, as in "beyond training"; what does not is left out."""
    if value is True:
        return axis_name(name)
    if name in ("split", "checkpoint"):
        return f"{value} {name}"
    return f"{axis_name(name)} {shown_value(value)}"


def interval(low: float | None, high: float | None) -> str:
    """An interval in brackets; empty where there is none, or where it has no width."""
    return f"[{format_number(low)}, {format_number(high)}]" if low is not None and high is not None else ""


def interval_name(figures: Sequence[Figure]) -> str:
    """What the intervals of these figures are of."""
    return "95 % interval" if any(len(figure.values) > 1 for figure in figures) else "the measurement's own interval"


def status_name(status: str) -> str:
    """`out_of_memory` as "out of memory"."""
    return status.replace("_", " ")


def without_addresses(text: str) -> str:
    """What a library says of an error may name its manual; a report names no address of a network."""
    return re.sub(r"\s*\(?https?://\S+", "", text)


def outcome(figure: Figure) -> str:
    """The figure's number, or what became of it."""
    return format_number(figure.mean) if figure.mean is not None else " and ".join(map(status_name, figure.statuses))


def listed(words: Iterable[str], last: str = "and") -> str:
    """a, b and c."""
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def ranked_answer(family: Family) -> str:
    """One sentence on a ranked metric at one setting; names a best variant only where the comparisons separated it."""
    ordered = _by_mean(family.figures, descending=family.higher_is_better)
    shown = [f"{figure.label} {outcome(figure)}" for figure in ordered]
    where = _opening(family.settings)
    what = metric_name(family.metric)
    if family.exploratory:
        return f"{where}{what} is {listed(shown)}: exploratory, too few seeds to rank."
    if family.best is not None:
        others = listed(text for figure, text in zip(ordered, shown, strict=True) if figure.variant != family.best)
        winner = next(figure for figure in ordered if figure.variant == family.best)
        return f"{where}{winner.label} has the best {what}, {outcome(winner)}, separated from {others}."
    leader = ordered[0].variant
    apart = [
        pair.second if pair.first == leader else pair.first
        for pair in family.comparisons
        if pair.is_separated and leader in (pair.first, pair.second)
    ]
    label = ordered[0].label
    ending = f"{label} is separated from {listed(apart)} only" if apart else f"{label} is separated from none"
    return f"{where}no variant is best in {what}: {listed(shown)}; {ending}."


def tally(families: Sequence[Family]) -> str:
    """How often who was best over all settings of a metric; empty for a single setting or where nothing is ranked."""
    ranked = [family for family in families if not family.exploratory]
    if len(ranked) < 2:
        return ""
    wins = {name: sum(family.best == name for family in ranked) for name in dict.fromkeys(f.best for f in ranked)}
    words = [f"{name} is best at {count}" for name, count in wins.items() if name is not None]
    nobody = wins.get(None, 0)
    words += [f"no variant at {nobody}" if words else "no variant is best at any"] if nobody else []
    return f"Over all {len(ranked)} settings of {metric_name(ranked[0].metric)}, {listed(words)}."


def overall(families: Sequence[Family]) -> str:
    """One sentence on several ranked scores: who is best at how many."""
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
    """One sentence on a metric that nobody ranks, such as a timing."""
    own = [figure for figure in figures if column.takes(figure)]
    ordered = _by_mean(own, descending=column.higher_is_better is not False)
    shown = listed(f"{figure.label} {outcome(figure)}" for figure in ordered)
    return f"{_opening(column.settings)}{metric_name(column.metric, column.unit)} is {shown}; measured, not ranked."


def capitalized(text: str) -> str:
    """The text with its first letter large and the others as they are."""
    return text[:1].upper() + text[1:]


def _opening(settings: dict[str, Any]) -> str:
    usual = {"split": "test", "checkpoint": "best"}
    where = place({name: value for name, value in settings.items() if usual.get(name) != value})
    return f"At {where}, " if where else ""


def _by_mean(figures: Sequence[Figure], *, descending: bool) -> list[Figure]:
    """Figures with a number in order, the others behind them."""
    sign = -1 if descending else 1
    return sorted(figures, key=lambda figure: (figure.mean is None, sign * (figure.mean or 0)))
