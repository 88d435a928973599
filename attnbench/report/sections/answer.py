"""The answer of a comparison in a few lines, alike on a page and on a terminal: who is better, and how sure that is."""

from collections.abc import Callable, Mapping, Sequence

from attnbench.report.sections import words
from attnbench.report.sections.corpora import corpora_lines
from attnbench.report.sections.surroundings import surroundings
from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.rows import ResultRow
from attnbench.results.tables import format_number
from attnbench.verdict.control import control_sentence, judge_control
from attnbench.verdict.costs import WIDTH, Priced, cost_metric, frontier, priced
from attnbench.verdict.ranking import Noise, Verdict, common_reference, noise_floor
from attnbench.verdict.seeds import Figure, same_models

FULL_LENGTHS = 8
"""Multiple of the trained length at which the perplexity stands in the answer."""

MANY = 6
"""Variants beside a reference up to which each has its sentence."""

NOT_SCORED = "Fewer than two variants were scored in an evaluation with a primary metric."


def answer(
    rows: Sequence[ResultRow],
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
    primaries: Mapping[str, Primary],
    descriptive: Sequence[str] = (),
    factors: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Write the lines of the answer by what they are about; those without anything to say are left out.

    Args:
        rows: of single seeds, whose settings say what stands around each mixer.
        verdicts: of the whole family.
        primaries: primary metric by evaluation.
        descriptive: sentences about evaluations that are not tested.
        factors: parts of a factorial, whose effects, in tables of their own, are the answer; lines of each of its
            corners would bury them.
    """
    if factors:
        return {"Descriptive": list(descriptive)} if descriptive else {}
    unscored = {} if descriptive else {"No verdict": [NOT_SCORED]}
    lines = {
        **corpora_lines(verdicts),
        **(verdict_lines(verdicts) if verdicts else unscored),
        **({"Descriptive": list(descriptive)} if descriptive else {}),
        **noise_lines(verdicts),
        **beyond_training(figures),
        "Bytes of state": by_state(figures, primaries),
        "Around the mixers": surroundings(rows),
    }
    return {term: sentences for term, sentences in lines.items() if sentences}


def sentences(
    rows: Sequence[ResultRow],
    control: Sequence[ResultRow],
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
    *,
    shared: Mapping[str, Mapping[str, str]],
    primaries: Mapping[str, Primary],
    reference: str | None,
    descriptive: Sequence[str] = (),
    factors: Sequence[str] = (),
) -> list[str]:
    """Write all that a comparison says, a sentence a line: models that are one, the answer, and the control.

    Args:
        rows, verdicts, primaries, descriptive, factors: as `answer`.
        control: rows of the reference under other seeds.
        shared: by evaluation, variants that are another's model, and whose.
    """
    lines = answer(rows, figures, verdicts, primaries, descriptive, factors)
    said = [f"{line}: one model, run once." for line in same_models(shared)]
    said += [f"{term}: {sentence}" for term, group in lines.items() for sentence in group]
    if reference is not None:
        said.append(control_sentence(judge_control(rows, control, reference=reference, primaries=primaries), reference))
    return list(filter(None, said))


def noise_lines(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Write the differences that a family could have detected."""
    noise = noise_floor([verdict.pair for verdict in verdicts])
    return {"Noise floor": [_floor(noise)]} if noise else {}


def beyond_training(figures: Sequence[Figure]) -> dict[str, list[str]]:
    """Write the scores at lengths that were not trained on."""
    of_text = [name for name in dict.fromkeys(f.evaluation for f in figures) if split_name(name)[0] == "perplexity"]
    on_each = [_perplexity_beyond([f for f in figures if f.evaluation == name], name) for name in of_text]
    sentences = [text for text in (*on_each, _copying_beyond(figures)) if text]
    return {"Beyond training": sentences} if sentences else {}


def by_state(figures: Sequence[Figure], primaries: Mapping[str, Primary]) -> list[str]:
    """Write the accuracies that no other comes near with as few bytes of state, a sentence a setting."""
    sentences = []
    for evaluation, primary in primaries.items():
        if cost_metric(primary) != "state_bytes":
            continue
        for points in priced(figures, evaluation, primary):
            settings = points[0].score.settings
            found = frontier(
                points, primary, max((settings[name] for name in settings if words.is_chance(name)), default=0)
            )
            if found and len({point.price for point in points}) > 1:
                sentences.append(_most_for_its_state(evaluation, primary, points, found))
    return sentences


def _most_for_its_state(evaluation: str, primary: Primary, points: Sequence[Priced], found: Sequence[Priced]) -> str:
    has_widths = len({point.score.settings.get(WIDTH) for point in points}) > 1
    skipped = ("split", *([WIDTH] if has_widths else []))
    place = words.where({name: value for name, value in found[0].score.settings.items() if name not in skipped})
    names = [f"{it.score.label}{f' at width {it.score.settings[WIDTH]}' if has_widths else ''}" for it in found]
    # Two digits tell apart what the margin does; an interval over few seeds would leave fewer.
    parts = [f"{name} {it.value:.2f} in {words.outcome(it.cost)}" for name, it in zip(names, found, strict=True)]
    return (
        f"{words.heading(evaluation)}{place and f' at {place}'}, most for its bytes of state: {'; '.join(parts)}. No "
        f"other comes within {primary.margin:g} of one of these with as few; by means, not tested."
    )


def verdict_lines(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Write who is better, equivalent and undecided, and what has no verdict; those that nobody is are left out.

    A sentence a pair of variants; of many with one reference, a sentence an evaluation.
    """
    winners = [it for it in verdicts if it.winner is not None]
    alike = [it for it in verdicts if it.is_equivalent and it.winner is None]
    reference = common_reference(verdicts)
    if reference is not None and len({it.pair.first for it in verdicts}) > MANY:
        better, equivalent = _better_together(winners, reference), _equivalent_together(alike, reference)
    else:
        better, equivalent = _by_pair(winners, _better), _by_pair(alike, _equivalent)
    lines = {
        "Better": better,
        "Equivalent": equivalent,
        "Undecided": _undecided([it for it in verdicts if it.outcome == "undecided" and not it.is_decided]),
        "No verdict": _without_verdict(verdicts),
    }
    return {term: sentences for term, sentences in lines.items() if sentences}


def _better_together(verdicts: Sequence[Verdict], reference: str) -> list[str]:
    """Write a sentence of each evaluation and size of a difference, the variants in the order of theirs."""
    groups: dict[tuple[str, bool, str], list[Verdict]] = {}
    for it in verdicts:
        groups.setdefault((_what(it), it.winner == reference, _size(it)), []).append(it)
    sentences = []
    for (what, is_worse, size), group in groups.items():
        who = f"{reference} is better than" if is_worse else f"better than {reference} {_are(group)}"
        sentences.append(f"{words.capitalized(what)}{size}: {who} {_in_order(group)}.")
    return sentences


def _equivalent_together(verdicts: Sequence[Verdict], reference: str) -> list[str]:
    groups: dict[str, list[Verdict]] = {}
    for it in verdicts:
        groups.setdefault(f"{words.capitalized(_what(it))}, within {it.pair.primary.margin_text}", []).append(it)
    return [f"{what}: as good as {reference} {_are(group)} {_in_order(group)}." for what, group in groups.items()]


def _are(verdicts: Sequence[Verdict]) -> str:
    return "are" if len(verdicts) > 1 else "is"


def _in_order(verdicts: Sequence[Verdict]) -> str:
    """List the variants beside the reference with their differences, the largest first."""
    ordered = sorted(verdicts, key=lambda it: -abs(it.difference or 0.0))
    return ", ".join(f"{it.pair.first} {words.difference(it)}" for it in ordered)


def _by_pair(verdicts: Sequence[Verdict], sentence: Callable[[list[Verdict]], str]) -> list[str]:
    """Write a sentence of each pair of variants, the better one named first."""
    pairs: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        pairs.setdefault(_names(verdict), []).append(verdict)
    return [sentence(group) for group in pairs.values()]


def _names(verdict: Verdict) -> tuple[str, str]:
    pair = verdict.pair
    return (pair.second, pair.first) if verdict.winner == pair.second else (pair.first, pair.second)


def _better(verdicts: list[Verdict]) -> str:
    first, second = _names(verdicts[0])
    parts = [f"{_what(verdict)} {words.difference(verdict)}{_size(verdict)}" for verdict in verdicts]
    return f"{first} is better than {second}: {'; '.join(parts)}."


def _size(verdict: Verdict) -> str:
    """Compare a difference with the margin, where that says something."""
    if verdict.is_equivalent:
        return ", less than matters"
    return f", more than {verdict.pair.primary.margin_text}" if verdict.exceeds_margin else ""


def _equivalent(verdicts: list[Verdict]) -> str:
    first, second = _names(verdicts[0])
    parts = [
        f"{_what(verdict)} {words.difference(verdict)}, within {verdict.pair.primary.margin_text}"
        for verdict in verdicts
    ]
    return f"{first} and {second}: {'; '.join(parts)}."


def _undecided(verdicts: Sequence[Verdict]) -> list[str]:
    """Write a sentence of each evaluation: its pairs, and how many seeds would decide each."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(_what(verdict), []).append(verdict)
    return [
        f"{evaluation} at {group[0].num_seeds} seeds; would be decided by: {'; '.join(_by_seeds(group))}."
        for evaluation, group in groups.items()
    ]


def _by_seeds(group: Sequence[Verdict]) -> list[str]:
    """Write how many seeds would decide each pair, those of one number together."""
    pairs: dict[str, list[str]] = {}
    for it in group:
        pairs.setdefault(it.reason or words.seeds_text(it), []).append(f"{it.pair.first} and {it.pair.second}")
    if len(pairs) == 1 and len(group) > 2:
        return [f"all {len(group)} pairs {next(iter(pairs))}"]
    return [f"{', '.join(names)} {text}" for text, names in pairs.items()]


def _what(verdict: Verdict) -> str:
    return verdict.pair.evaluation


def _without_verdict(verdicts: Sequence[Verdict]) -> list[str]:
    """Name the pairs that have no verdict, those of one reason together."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.outcome == "none":
            groups.setdefault(verdict.reason, []).append(verdict)
    return [f"{words.capitalized(reason)}: {_all_or_listed(group, len(verdicts))}." for reason, group in groups.items()]


def _all_or_listed(verdicts: Sequence[Verdict], num: int) -> str:
    if len(verdicts) == num:
        return f"all {num} pairs" if num > 1 else "the only pair"
    return "; ".join(f"{it.pair.first} and {it.pair.second} in {it.pair.evaluation}" for it in verdicts)


def _floor(noise: Sequence[Noise]) -> str:
    floors = "; ".join(map(words.noise_sentence, noise))
    return f"Found with a probability of 0.8 would be a difference of at least: {floors}."


def _perplexity_beyond(figures: Sequence[Figure], evaluation: str) -> str:
    """Write the test perplexities at eight times the trained length, or at the longest below it that was measured."""
    trained = {figure.identity.seq_len for figure in figures}
    # Variants that were trained at several lengths have no common multiple.
    length = trained.pop() if len(trained) == 1 else None
    if length is None:
        return ""
    wanted = [
        figure
        for figure in figures
        if (figure.metric, figure.settings.get("split")) == ("perplexity", "test")
        and length < figure.settings.get("sequence_length", 0) <= FULL_LENGTHS * length
        and "position_bucket" not in figure.settings
    ]
    longest = _longest(wanted, "sequence_length")
    if not longest:
        return ""
    reached = longest[0].settings["sequence_length"]
    where = f"at {reached:,} characters, {format_number(reached / length)} times the trained length"
    return f"{words.heading(evaluation)} {where}: {_values(longest, descending=False)}."


def _copying_beyond(figures: Sequence[Figure]) -> str:
    """Write the accuracies of copying strings twice as long as any that was trained on, or nearest to it."""
    copied = [figure for figure in figures if (figure.evaluation, figure.metric) == ("copy", "symbol_accuracy")]
    trained = max((f.settings["length"] for f in copied if not f.settings.get("beyond_training")), default=0)
    beyond = [figure for figure in copied if figure.settings.get("beyond_training")]
    if not trained or not beyond:
        return ""
    length = min((figure.settings["length"] for figure in beyond), key=lambda length: abs(length - 2 * trained))
    at_length = [figure for figure in beyond if figure.settings["length"] == length]
    times = f"{format_number(length / trained)} times the trained length"
    return f"Copying {length:,} symbols, {times}: {_values(at_length, descending=True)}."


def _longest(figures: Sequence[Figure], axis: str) -> list[Figure]:
    """Take the figures at the greatest value of an axis, of one checkpoint, with full context if any are."""
    greatest = max((figure.settings[axis] for figure in figures), default=None)
    longest = [figure for figure in figures if figure.settings[axis] == greatest]
    full = [figure for figure in longest if figure.settings.get("context") == "full"]
    return [figure for figure in full or longest if figure.settings == (full or longest)[0].settings]


def _values(figures: Sequence[Figure], *, descending: bool) -> str:
    sign = -1 if descending else 1
    ordered = sorted(figures, key=lambda figure: (figure.mean is None, sign * (figure.mean or 0)))
    return ", ".join(f"{figure.label} {words.outcome(figure)}" for figure in ordered)
