"""Names, numbers and sentences as plain text."""

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.results.corpora import on_corpus, split_name, units_of
from attnbench.results.numbers import format_interval, format_number, format_within, percent_of_nats, without_rounding
from attnbench.results.rows import TRAINING, Identity
from attnbench.results.tables import NOTHING
from attnbench.verdict.axes import PER_RUN, is_chance
from attnbench.verdict.ranking import Noise, Verdict
from attnbench.verdict.seeds import Figure, sittings_lead
from attnbench.verdict.summary import Column

NAMES = {
    "steps_to_95": "steps to 95 %",
    "forward_flops_per_token": "forward FLOPs per token",
    "achieved_tflops": "achieved TFLOP/s",
    "part_share": "share of a step's time",
}
AXES = {"position_bucket": "position in the window"}
UNITS_IN_NAMES = {"_mib": " (MiB)", "_milliseconds": " time (ms)", "_seconds": " time (s)", "_bytes": " (bytes)"}
USUAL = {"split": "test", "checkpoint": "best"}


def metric_name(metric: str, unit: str = "") -> str:
    """Format `training_peak_mib` as "training peak (MiB)"."""
    if metric in NAMES:
        return NAMES[metric]
    for ending, shown in UNITS_IN_NAMES.items():
        if metric.endswith(ending):
            return metric.removesuffix(ending).replace("_", " ") + shown
    name = metric.replace("_", " ")
    return name if unit in ("", "1") or "_per_" in metric else f"{name} ({unit})"


def heading(evaluation: str) -> str:
    return capitalized(evaluation.replace("_", " "))


def task(evaluation: str) -> str:
    name, corpus = split_name(evaluation)
    return on_corpus("Language model", corpus) if name == TRAINING else heading(evaluation)


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.removeprefix("num_").replace("_", " "))


def shown_value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return str(value)


def chance_level(level: float) -> str:
    return "below 0.0001" if 0 < level < 1e-4 else shown_value(level)


def chances(settings: dict[str, Any]) -> str:
    """List chance levels: "chance 0.0002441, among pairs 0.0625"; or empty."""
    levels = {name: chance_level(value) for name, value in settings.items() if is_chance(name)}
    return ", ".join(f"{name.removeprefix('chance_').replace('_', ' ')} {level}" for name, level in levels.items())


def where(settings: dict[str, Any]) -> str:
    """Format settings as "sequence length 256, pairs 16"; or empty."""
    names = [name for name in settings if not is_chance(name) and name not in PER_RUN]
    return ", ".join(_setting(name, settings[name]) for name in names if settings[name] is not False)


def _setting(name: str, value: Any) -> str:
    if value is True:
        return axis_name(name)
    if name in ("split", "checkpoint"):
        return f"{value} {name}"
    return f"{axis_name(name)} {shown_value(value)}"


def interval_name(figures: Sequence[Figure]) -> str:
    return "95 % interval" if any(len(figure.values) > 1 for figure in figures) else "the measurement's own interval"


def status_name(status: str) -> str:
    return status.replace("_", " ")


def without_addresses(text: str) -> str:
    """Remove network addresses, which a library's error may contain but a report may not."""
    return re.sub(r"\s*\(?https?://\S+", "", text)


def outcome(figure: Figure, *, in_table: bool = False) -> str:
    number = figure.number if in_table else figure.text
    if not number:
        return " and ".join(map(status_name, figure.statuses))
    return f"{number} ({figure.partly})" if figure.partly else number


def listed(words: Iterable[str], last: str = "and") -> str:
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def devices(names: Iterable[str]) -> str:
    """Name devices; a processor with several numbers of threads is named once."""
    threads: dict[str, set[int]] = {}
    for name in names:
        processor = re.fullmatch(r"(.*) \((\d+) threads\)", name)
        numbers = threads.setdefault(processor[1] if processor else name, set())
        if processor:
            numbers.add(int(processor[2]))
    return listed(
        f"{device} ({listed(map(str, sorted(numbers)), 'or')} thread{'' if numbers == {1} else 's'})"
        if numbers
        else device
        for device, numbers in threads.items()
    )


def symbols(identities: Iterable[Identity]) -> str:
    units = {units_of(identity.corpus) for identity in identities}
    return units.pop() if len(units) == 1 else "tokens"


def verdict_sentence(verdict: Verdict) -> str:
    pair = verdict.pair
    place = _unusual(pair.settings)
    if pair.primary.kind != "nats":
        name = f"{metric_name(pair.primary.metric)} of {pair.evaluation}"
    else:
        name = pair.evaluation if split_name(pair.evaluation)[0] == "perplexity" else f"perplexity of {pair.evaluation}"
    what = f"{name}{place and f' at {place}'}{of_seeds(verdict)}"
    if verdict.outcome == "none":
        return f"No verdict on {pair.first} and {pair.second} in {what}: {verdict.reason}."
    by = difference(verdict)
    if verdict.winner is not None:
        other = pair.second if verdict.winner == pair.first else pair.first
        ending = f", by more than {pair.primary.margin_text}" if verdict.exceeds_margin else ""
        ending = f", by less than matters ({pair.primary.margin_text})" if verdict.is_equivalent else ending
        whose = f"{other}’s is " if pair.primary.kind == "nats" and verdict.winner == pair.second else ""
        return f"{verdict.winner} is better than {other} in {what}: {whose}{by}{ending}."
    if verdict.is_equivalent:
        return f"{pair.first} and {pair.second} are equivalent in {what}, within {pair.primary.margin_text}: {by}."
    ending = verdict.reason or f"undecided at {verdict.num_seeds} seeds; {seeds_text(verdict)} would decide"
    return f"{pair.first} and {pair.second} in {what}: {by}, {ending}."


def of_seeds(verdict: Verdict) -> str:
    """Name the seeds that a verdict on accuracies is about, ", of seeds that solve it"; empty if it is about all."""
    is_limited = verdict.is_equivalent and verdict.pair.primary.kind == "accuracy"
    condition = verdict.pair.condition or ("seeds like these" if is_limited else "")
    return f", of {condition}" if condition else ""


def seeds_text(verdict: Verdict) -> str:
    return "more than 100" if verdict.seeds_needed is None else f"about {verdict.seeds_needed}"


def difference(verdict: Verdict) -> str:
    """Format a difference and its interval, with the numbers of seeds that solve the task.

    Scores: the better one minus the other. Perplexity: the first's relative to the second's, in percent: "84 % [55,
    119] higher"; with a sign if neither is better.
    """
    pair = verdict.pair
    notes = [f"diverged seeds of {listed(pair.failed)} count as chance"] if pair.failed else []
    if pair.solved is not None and not pair.condition:
        better, other = reversed(pair.solved) if verdict.winner == pair.second else pair.solved
        notes.append(f"{better} and {other} of {len(pair.seeds)} solved")
    return " ".join([_interval(verdict), *([f"({'; '.join(notes)})"] if notes else [])])


def _interval(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.low is None or verdict.high is None:
        return NOTHING
    ends = verdict.difference, verdict.low, verdict.high
    if verdict.pair.primary.kind != "nats":
        mean, low, high = (-ends[0], -ends[2], -ends[1]) if verdict.winner == verdict.pair.second else ends
        return f"{format_within(mean, low, high, '+')} {format_interval(low, high, '+', is_of_difference=True)}"
    mean, low, high = (percent_of_nats(value) for value in ends)
    if verdict.winner is None:
        return f"{format_within(mean, low, high, '+')} % {format_interval(low, high, '+', is_of_difference=True)}"
    if verdict.winner == verdict.pair.second:
        return f"{format_within(mean, low, high)} % {format_interval(low, high, is_of_difference=True)} higher"
    return f"{format_within(-mean, -high, -low)} % {format_interval(-high, -low, is_of_difference=True)} lower"


def noise_sentence(noise: Noise) -> str:
    if not noise.detectable:
        have = f"{noise.num_seeds} seed{' is' if noise.num_seeds == 1 else 's are'} too few"
        return f"{noise.evaluation} none ({have}, {noise.fewest_seeds} would do)"
    ends = median(noise.detectable), max(noise.detectable)
    left_out = noise.num_pairs - len(noise.detectable)
    of_some = f" ({left_out} of {noise.num_pairs} pairs have too few seeds for any)" if left_out else ""
    if noise.primary.kind == "nats":
        half, most = (f"{percent_of_nats(value):.2g}" for value in ends)
        return f"{noise.evaluation} {half} and {most} % of perplexity{of_some}"
    return f"{noise.evaluation} {ends[0]:.2g} and {ends[1]:.2g} {noise.primary.scale}{of_some}"


def plain_answer(figures: Sequence[Figure], column: Column) -> str:
    taken = [figure for figure in figures if column.takes(figure)]
    # Timings of several processes are not sorted.
    is_mixed = sittings_lead(("", figure) for figure in taken)
    ordered = taken if is_mixed else by_mean(taken, descending=column.higher_is_better is not False)
    shown = listed(f"{figure.label} {outcome(figure)}" for figure in ordered)
    place = _unusual(column.settings)
    opening = f"At {place}, " if place else ""
    return f"{opening}{metric_name(column.metric, column.unit)} is {shown}; measured, not ranked."


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unusual(settings: dict[str, Any]) -> str:
    return where({name: value for name, value in settings.items() if USUAL.get(name) != value})


def by_mean(figures: Sequence[Figure], *, descending: bool) -> list[Figure]:
    sign = -1 if descending else 1
    return sorted(figures, key=lambda figure: (figure.mean is None, sign * without_rounding(figure.mean or 0)))
