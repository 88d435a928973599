"""Names, numbers and sentences as plain text."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from attnbench.results.corpora import on_corpus, split_name, units_of
from attnbench.results.metrics import Primary, is_timed
from attnbench.results.numbers import format_interval, format_number, format_within, percent_of_nats, without_rounding
from attnbench.results.rows import TRAINING, Identity
from attnbench.results.tables import NOTHING
from attnbench.verdict.axes import PER_RUN, is_chance
from attnbench.verdict.ranking import Noise, Verdict
from attnbench.verdict.seeds import Figure, is_accuracy, sittings_lead
from attnbench.verdict.summary import Column, evaluation_class

NAMES = {
    "steps_to_95": "steps to 95 % at two checks in a row",
    "samples_to_95": "training sequences to 95 %",
    "forward_flops_per_token": "forward FLOPs per token",
    "achieved_tflops": "achieved TFLOP/s",
    "part_share": "share of a step's time",
    "symbol_accuracy": "symbols right",
    "string_accuracy": "whole strings right",
    "macro_accuracy": "accuracy, mean of symbols",
    "mean_accuracy": "accuracy, mean of cells",
    "doublings": "doublings held",
    "largest_held": "largest level held",
    "pairs_per_kib": "pairs recalled per KiB of state",
    "selection": "validation accuracy",
    "solved": "seeds that solve it",
    "steps_trained": "steps trained",
    "nats_per_character": "nats per character",
    "growth_exponent": "exponent of memory's growth",
    "ceiling_fraction": "share of the device's peak",
    "roofline_fraction": "share of the roofline",
    "peak_memory_mib": "peak memory (MiB)",
    "training_peak_mib": "training memory (MiB)",
    "forward_peak_mib": "forward memory (MiB)",
    "step_milliseconds": "training step (ms)",
    "tokens_per_second": "tokens/s",
    "generator_tokens_per_second": "generated tokens/s",
    "prefill_tokens_per_second": "prefill tokens/s",
    "decode_tokens_per_second": "decoded tokens/s",
    "state_bytes": "state (bytes)",
    "train_seconds": "training time (s)",
}
SCORES = {
    ("training", "tokens_per_second"): "tokens/s of the training",
    ("recall", "accuracy"): "pairs recalled",
    ("copy", "symbol_accuracy"): "symbols copied",
    ("copy", "string_accuracy"): "whole strings copied",
    ("state_tracking", "accuracy"): "states tracked",
    ("needle", "accuracy"): "values found",
}
"""Names of scores by evaluation and metric; where there is none, the evaluation's and the metric's."""
AXES = {
    "position_bucket": "position in the window",
    "num_pairs": "pairs",
    "slice": "tokens",
    "budget": "at most",
    "beyond_training": "longer than trained",
    "training_lengths": "times the trained length",
}
UNITS_IN_NAMES = {"_mib": " (MiB)", "_milliseconds": " time (ms)", "_seconds": " time (s)", "_bytes": " (bytes)"}
USUAL = {"split": "test", "checkpoint": "best"}


def metric_name(metric: str, unit: str = "") -> str:
    """`training_peak_mib` is "training peak (MiB)"."""
    if metric in NAMES:
        return NAMES[metric]
    for ending, shown in UNITS_IN_NAMES.items():
        if metric.endswith(ending):
            return metric.removesuffix(ending).replace("_", " ") + shown
    name = metric.replace("_", " ")
    return name if unit in ("", "1") or "_per_" in metric else f"{name} ({unit})"


def score_name(evaluation: str, metric: str, unit: str = "") -> str:
    """Text such as "pairs recalled (%)", "echo accuracy (%)", "tokens/s"."""
    name, corpus = split_name(evaluation)
    shown = SCORES.get((name, metric))
    if shown is None:
        is_plain = not is_accuracy(metric) and metric != "doublings"
        shown = metric_name(metric, unit) if is_plain else f"{heading(name)}: {metric_name(metric)}"
    return on_corpus(f"{shown} (%)" if is_accuracy(metric) else shown, corpus)


def heading(evaluation: str) -> str:
    return capitalized(evaluation.replace("_", " "))


def task(evaluation: str) -> str:
    name, corpus = split_name(evaluation)
    return on_corpus("Language model", corpus) if name == TRAINING else heading(evaluation)


CORPORA = {"embedded": "the text of Python’s help()", "wikitext2-v1": "WikiText-2", "wikitext103-v1": "WikiText-103"}


def corpus_name(label: str) -> str:
    """Text such as "WikiText-2 (bpe-4096)" for "wikitext2-v1:bpe-4096@ab12"."""
    name, _, tokenizer = label.rpartition("@")[0].partition(":")
    return CORPORA.get(name, name) + f" ({tokenizer})" * bool(tokenizer)


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.removeprefix("num_").replace("_", " "))


def shown_value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return str(value)


def chance_level(level: float) -> str:
    return "below 0.0001" if 0 < level < 1e-4 else shown_value(level)


def chances(settings: dict[str, Any]) -> str:
    """Text such as "chance 0.0002441, among pairs 0.0625"."""
    levels = {name: chance_level(value) for name, value in settings.items() if is_chance(name)}
    return ", ".join(f"{name.removeprefix('chance_').replace('_', ' ')} {level}" for name, level in levels.items())


def where(settings: dict[str, Any]) -> str:
    """Text such as "sequence length 256, pairs 16"."""
    names = [name for name in settings if not is_chance(name) and name not in PER_RUN]
    return ", ".join(_setting(name, settings[name]) for name in names if settings[name] is not False)


def _setting(name: str, value: Any) -> str:
    if value is True:
        return axis_name(name)
    if name in ("split", "checkpoint"):
        return f"{value} {name}"
    return f"{axis_name(name)} {shown_value(value)}"


def interval_name(figures: Sequence[Figure]) -> str:
    if any(figure.has_range for figure in figures):
        return "lowest and highest seed"
    if any(len(figure.values) > 1 for figure in figures):
        return "95 % interval over seeds"
    if any(is_timed(figure.metric, figure.unit) for figure in figures):
        return "20th and 80th percentile of repetitions"
    return "one standard error" if figures[0].metric == "growth_exponent" else "95 % interval over test items"


def status_name(status: str) -> str:
    return status.replace("_", " ")


def without_addresses(text: str) -> str:
    """A library's error may contain network addresses, but a report may not."""
    return re.sub(r"\s*\(?https?://\S+", "", text)


def outcome(figure: Figure, *, in_table: bool = False) -> str:
    if figure.metric == "solved" and figure.values:
        return f"{sum(figure.values.values()):.0f} of {len(figure.values)}"
    number = figure.number if in_table else figure.text
    if not number:
        return figure.lack
    return f"{number} ({figure.partly})" if figure.partly else number


def listed(words: Iterable[str], last: str = "and") -> str:
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def validated_on(evaluation: str) -> str:
    """Say what validation data of a probe have that tests have not: "all trained lengths mixed"; or empty."""
    return getattr(evaluation_class(evaluation), "validated_on", "")


def devices(names: Iterable[str]) -> str:
    """A processor with several numbers of threads is named once."""
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


ACTS = {
    "recall": ("recalls", "pairs"),
    "copy": ("copies", "symbols"),
    "state_tracking": ("tracks", "states"),
    "needle": ("finds", "values"),
}
"""Verb and object of an evaluation whose score is a share."""


def advantage(verdict: Verdict) -> tuple[str, str, str]:
    """Return how far the winner is ahead in three parts: "has", "12.9 % [10.9, 14.8]", "lower perplexity"."""
    pair = verdict.pair
    name, corpus = split_name(pair.evaluation)
    ahead, low, high = _ends(verdict)
    if pair.primary.kind == "nats":
        # Relative to the loser's perplexity.
        ahead, low, high = (-percent_of_nats(-end) for end in (ahead, low, high))
        amount = f"{format_within(ahead, low, high)} % {format_interval(low, high, is_of_difference=True)}"
        return "has", amount, on_corpus("lower perplexity" + f" in {name}" * (name != "perplexity"), corpus)
    if pair.primary.kind == "level":
        verb, what = "holds", f"more {pair.primary.metric} of {name.removeprefix('ladder_').replace('_', ' ')}"
    else:
        ahead, low, high = (100 * end for end in (ahead, low, high))
        verb, noun = ACTS.get(name, ("gets", f"answers right in {name.replace('_', ' ')}"))
        what = f"more of 100 {noun}"
    amount = f"{format_within(ahead, low, high)} {format_interval(low, high, is_of_difference=True)}"
    return verb, amount, what


def _ends(verdict: Verdict) -> tuple[float, float, float]:
    """The winner's lead and its interval, above 0 for any metric."""
    assert verdict.difference is not None
    assert verdict.low is not None
    assert verdict.high is not None
    sign = 1 if verdict.winner == verdict.pair.first else -1
    sign = sign if verdict.pair.primary.higher_is_better else -sign
    ends = sorted((sign * verdict.low, sign * verdict.high))
    return sign * verdict.difference, ends[0], ends[1]


def loser(verdict: Verdict) -> str:
    return verdict.pair.second if verdict.winner == verdict.pair.first else verdict.pair.first


def verdict_sentence(verdict: Verdict) -> str:
    pair = verdict.pair
    place = _unusual(pair.settings)
    if verdict.winner is not None:
        verb, amount, what = advantage(verdict)
        where = f" at {place}" * bool(place)
        ending = f", by more than {pair.primary.margin_text}" if verdict.exceeds_margin else ""
        ending = f", by less than matters ({pair.primary.margin_text})" if verdict.is_equivalent else ending
        told = f" ({'; '.join(notes(verdict))})" if notes(verdict) else ""
        condition = of_seeds(verdict)
        return f"{verdict.winner} {verb} {amount} {what} than {loser(verdict)}{where}{condition}{told}{ending}."
    if pair.primary.kind != "nats":
        name = f"{metric_name(pair.primary.metric)} of {pair.evaluation}"
    else:
        name = pair.evaluation if split_name(pair.evaluation)[0] == "perplexity" else f"perplexity of {pair.evaluation}"
    what = f"{name}{place and f' at {place}'}{of_seeds(verdict)}"
    if verdict.outcome == "none":
        return f"No verdict on {pair.first} and {pair.second} in {what}: {verdict.reason}."
    by = difference(verdict)
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
    """Format a difference, the first less the second, and its interval, with the seeds that solve the task.

    Perplexity: the first's relative to the second's, in percent.
    """
    told = notes(verdict)
    return " ".join([_interval(verdict), *([f"({'; '.join(told)})"] if told else [])])


def notes(verdict: Verdict) -> list[str]:
    pair = verdict.pair
    told = [f"diverged seeds of {listed(pair.failed)} count as chance"] if pair.failed else []
    if pair.solved is not None and not pair.condition:
        better, other = reversed(pair.solved) if verdict.winner == pair.second else pair.solved
        told.append(f"{better} and {other} of {len(pair.seeds)} seeds solved")
    return told


def _interval(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.low is None or verdict.high is None:
        return NOTHING
    is_nats = verdict.pair.primary.kind == "nats"
    ends = (verdict.difference, verdict.low, verdict.high)
    mean, low, high = map(percent_of_nats, ends) if is_nats else ends
    number = f"{format_within(mean, low, high, '+')}{' %' * is_nats}"
    return f"{number} {format_interval(low, high, '+', is_of_difference=True)}"


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


def score(figure: Figure, primary: Primary | None, *, more: int = 0) -> str:
    """Format a mean so that its last digit is no larger than the difference that matters, accuracies in percent.

    Without such a difference it has three digits; `more` are added.
    """
    if figure.mean is None:
        return figure.lack
    value = figure.mean * (100 if is_accuracy(figure.metric) else 1)
    return f"{figure.ratio_text}{_rounded(value, figure.metric, primary, more)}"


def _rounded(value: float, metric: str, primary: Primary | None, more: int = 0) -> str:
    if primary is not None and (metric == primary.metric or primary.kind == "nats"):
        matters = primary.margin * (100 if is_accuracy(metric) else abs(value) if metric == "perplexity" else 1)
    else:
        matters = 10.0 ** (math.floor(math.log10(abs(value))) - 2) if value else 1.0
    if not 1e-9 < matters < 1e9 or abs(value) >= 1e15:
        return format_number(value)
    # A margin of 1 % in nats is a little less than 0.01.
    decimals = math.ceil(-math.log10(matters) - 0.05) + more
    return f"{round(value, decimals) + 0.0:,.{max(decimals, 0)}f}"


def seed_scores(figure: Figure, primary: Primary | None) -> str:
    factor = 100 if is_accuracy(figure.metric) else 1
    return ", ".join(_rounded(factor * value, figure.metric, primary) for value in figure.values.values())


def plain_answer(figures: Sequence[Figure], column: Column, primary: Primary | None = None) -> str:
    """List the means of a score that is not tested and, where they are few, its seeds, and whose overlap."""
    taken = [figure for figure in figures if column.takes(figure)]
    # Timings of several processes are not sorted.
    is_mixed = sittings_lead(("", figure) for figure in taken)
    ordered = taken if is_mixed else by_mean(taken, descending=column.higher_is_better is not False)
    unit = " %" if is_accuracy(column.metric) else ""
    shown = []
    for it in ordered:
        number = f"{score(it, primary)}{unit}" if it.mean is not None else it.lack
        seeds = seed_scores(it, primary) if primary is not None and it.is_of_few else ""
        notes = [f"{'' if shown else 'seeds '}{seeds}" if seeds else "", it.partly if it.mean is not None else ""]
        shown.append(f"{it.label} {number}" + f" ({'; '.join(filter(None, notes))})" * any(notes))
    place = _unusual({name: value for name, value in column.place.items() if name != "context"})
    place = place.replace("sequence length", "length")
    name = capitalized(score_name(column.evaluation, column.metric, column.unit).removesuffix(" (%)"))
    overlap = _overlap([it for it in ordered if it.is_of_few]) if primary is not None else ""
    return f"{name}{f' at {place}' * bool(place)}: {'; '.join(shown)}.{overlap}"


def _overlap(ordered: Sequence[Figure]) -> str:
    if len(ordered) < 2:
        return ""
    best, *others = ordered
    low, high = best.range
    overlapping = [it.label for it in others if it.range[0] <= high and low <= it.range[1]]
    if overlapping:
        return f" Seeds of {best.label} overlap with those of {listed(overlapping)}."
    return f" Every seed of {best.label} is better than any other variant’s."


BETWEEN_NUMBER_AND_UNIT = re.compile(
    r"(?<=\d) (?=(?:%|×|(?:M|ms|s|nats?|[KMG]iB|solved|of \d+)\b))|(?<=×) (?=\d)|(?<=\d of) (?=\d)| (?=[↑↓])"
    r"|(?:(?<=length)|(?<=width)|(?<=pairs)|(?<=size)|(?<=model)) (?=\d)"
)

BRACKET_OF_NUMBERS = re.compile(r"[\[(][+-]?[\d.,]+(?:, [+-]?[\d.,]+){1,3}[\])]")


def unbroken(text: str) -> str:
    """Put no-break spaces between a number and its unit, and in brackets of two to four numbers."""
    space = "\N{NO-BREAK SPACE}"
    text = BRACKET_OF_NUMBERS.sub(lambda found: found[0].replace(" ", space), text)
    return BETWEEN_NUMBER_AND_UNIT.sub(space, text)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unusual(settings: dict[str, Any]) -> str:
    return where({name: value for name, value in settings.items() if USUAL.get(name) != value})


def by_mean(figures: Sequence[Figure], *, descending: bool) -> list[Figure]:
    sign = -1 if descending else 1
    return sorted(figures, key=lambda figure: (figure.mean is None, sign * without_rounding(figure.mean or 0)))
