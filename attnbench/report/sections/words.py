"""Names, numbers and sentences as a reader meets them. Text in, text out; no HTML."""

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.results.corpora import on_corpus, split_name, units_of
from attnbench.results.metrics import Primary
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


def task(evaluation: str) -> str:
    """Write what a learning rate is for: `training` as "Language model"."""
    name, corpus = split_name(evaluation)
    return on_corpus("Language model", corpus) if name == TRAINING else heading(evaluation)


def axis_name(axis: str) -> str:
    """Write `num_pairs` as "pairs"."""
    return AXES.get(axis, axis.removeprefix("num_").replace("_", " "))


def shown_value(value: Any) -> str:
    """Write a setting's value, numbers with four digits or thousands separated."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return str(value)


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


def interval_name(figures: Sequence[Figure]) -> str:
    """Name the kind of interval that these figures have."""
    return "95 % interval" if any(len(figure.values) > 1 for figure in figures) else "the measurement's own interval"


def status_name(status: str) -> str:
    """Write `out_of_memory` as "out of memory"."""
    return status.replace("_", " ")


def without_addresses(text: str) -> str:
    """Strip network addresses: a library's error may name its manual, and a report names no address."""
    return re.sub(r"\s*\(?https?://\S+", "", text)


def outcome(figure: Figure, *, in_table: bool = False) -> str:
    """Write the figure's number and, where not all seeds have one, of how many it is; or its statuses."""
    number = figure.number if in_table else figure.text
    if not number:
        return " and ".join(map(status_name, figure.statuses))
    return f"{number} ({figure.partly})" if figure.partly else number


def listed(words: Iterable[str], last: str = "and") -> str:
    """Join words as "a, b and c"."""
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def devices(names: Iterable[str]) -> str:
    """Name the devices of rows; a processor that several numbers of threads ran on stands once, with these."""
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
    """Name what the positions of language models hold, of corpora in several units tokens."""
    units = {units_of(identity.corpus) for identity in identities}
    return units.pop() if len(units) == 1 else "tokens"


def verdict_sentence(verdict: Verdict) -> str:
    """Write one sentence on a pair: better or worse and by how much, equivalent, or undecided and what would decide."""
    pair = verdict.pair
    what = f"{primary_name(pair.evaluation, pair.primary)}{_at(pair.settings)}{of_seeds(verdict)}"
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
    """Name the seeds that a verdict on accuracies is about: ", of seeds that solve it"; empty where it is about all.

    Equal accuracies never say how often a seed fails.
    """
    is_limited = verdict.is_equivalent and verdict.pair.primary.kind == "accuracy"
    condition = verdict.pair.condition or ("seeds like these" if is_limited else "")
    return f", of {condition}" if condition else ""


def seeds_text(verdict: Verdict) -> str:
    """Write the number of seeds that would decide a pair."""
    return "more than 100" if verdict.seeds_needed is None else f"about {verdict.seeds_needed}"


def primary_name(evaluation: str, primary: Primary) -> str:
    """Name what a verdict is about: "accuracy of recall"; of nats the perplexity, in whose percent differences are."""
    if primary.kind != "nats":
        return f"{metric_name(primary.metric)} of {evaluation}"
    return evaluation if split_name(evaluation)[0] == "perplexity" else f"perplexity of {evaluation}"


def difference(verdict: Verdict) -> str:
    """Write the difference and its interval, of scores the better one's less the other's, whose number is not all
    scores, and how many seeds solve the task, in the same order; `of_seeds` says it where all or none do.

    Of perplexity it is how far the first's is from the second's, which is the reference where there is one, in percent
    of the second's: "84 % [55, 119] higher", and with its sign where neither is better.
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
    """Write the differences in one primary metric that half of the pairs and that all could have detected."""
    if not noise.detectable:
        have = f"{noise.num_seeds} seed{' is' if noise.num_seeds == 1 else 's are'} too few"
        return f"{noise.evaluation} none ({have}, {noise.fewest_seeds} would do)"
    ends = median(noise.detectable), max(noise.detectable)
    left_out = noise.num_pairs - len(noise.detectable)
    of_some = f" ({left_out} of {noise.num_pairs} pairs have too few seeds for any)" if left_out else ""
    if noise.primary.kind == "nats":
        half, most = (f"{percent_of_nats(value):.2g}" for value in ends)
        return f"{noise.evaluation} {half} and {most} % of perplexity{of_some}"
    return f"{noise.evaluation} {ends[0]:.2g} and {ends[1]:.2g} in {noise.primary.kind}{of_some}"


def plain_answer(figures: Sequence[Figure], column: Column) -> str:
    """Write one sentence on a metric that nobody ranks, such as a timing."""
    taken = [figure for figure in figures if column.takes(figure)]
    # Timings of several sittings are in no order.
    is_mixed = sittings_lead(("", figure) for figure in taken)
    ordered = taken if is_mixed else by_mean(taken, descending=column.higher_is_better is not False)
    shown = listed(f"{figure.label} {outcome(figure)}" for figure in ordered)
    return f"{_opening(column.settings)}{metric_name(column.metric, column.unit)} is {shown}; measured, not ranked."


def capitalized(text: str) -> str:
    """Make the first letter large and leave the others as they are."""
    return text[:1].upper() + text[1:]


def _opening(settings: dict[str, Any]) -> str:
    text = _unusual(settings)
    return f"At {text}, " if text else ""


def _at(settings: dict[str, Any]) -> str:
    text = _unusual(settings)
    return f" at {text}" if text else ""


def _unusual(settings: dict[str, Any]) -> str:
    usual = {"split": "test", "checkpoint": "best"}
    return where({name: value for name, value in settings.items() if usual.get(name) != value})


def by_mean(figures: Sequence[Figure], *, descending: bool) -> list[Figure]:
    """Sort figures by their means; equal means keep their order, and figures without a number come last."""
    sign = -1 if descending else 1
    return sorted(figures, key=lambda figure: (figure.mean is None, sign * without_rounding(figure.mean or 0)))
