"""The answer of a comparison in a few lines, equal on a page and a terminal: which variant is better, by how much."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnbench.report.sections import words
from attnbench.report.sections.corpus_table import corpora_lines
from attnbench.report.sections.surroundings import surroundings
from attnbench.report.sections.verdicts import verdict_lines
from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.numbers import format_number
from attnbench.settings.schema import FEW_SEEDS, MAX_PAIRED
from attnbench.verdict.control import control_sentence
from attnbench.verdict.costs import WIDTH, Priced, frontier, priced, widths_of
from attnbench.verdict.family import primary_figures
from attnbench.verdict.ranking import Verdict, noise_floor
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import Figure, same_models

if TYPE_CHECKING:
    # Imported here: it loads torch, and commands check their settings first.
    from attnbench.report.inputs import Inputs

FULL_LENGTHS = 8
"""Multiple of the trained length whose perplexity is in the answer."""

UNFINISHED = "The plan is not finished: verdicts are on the finished runs and may change."
NO_PRIMARY = "Nothing is compared: no evaluation here has a primary metric, on which verdicts are based."
NO_REFERENCE = "Nothing is compared: more than {} variants need a reference, which a plan names (plan.reference)."
NOT_SCORED = "Fewer than two variants were scored in an evaluation with a primary metric."


def answer(inputs: "Inputs") -> dict[str, list[str]]:
    """Return the lines of the answer by topic; empty topics are left out. For a factorial, the tables of effects are
    the answer."""
    protocol, verdicts = inputs.protocol, inputs.verdicts
    unfinished = {"Unfinished": [UNFINISHED] if protocol.missing else []}
    described = {"Descriptive": list(protocol.descriptive), "Learning rates": edge_lines(protocol.rates)}
    unscored = {} if protocol.descriptive else {"No verdict": [unscored_reason(inputs)]}
    lines = {
        **corpora_lines(verdicts),
        **(verdict_lines(verdicts) if verdicts else unscored),
        **described,
        "Seed by seed": [] if protocol.rank or protocol.factors else seed_lines(inputs),
        **noise_lines(verdicts, in_looks=protocol.in_looks),
        **beyond_training(inputs.figures),
        "Bytes of state": by_state(inputs.figures, inputs.primaries),
        "Around the mixers": surroundings(inputs.rows),
    }
    told = unfinished | (described if protocol.factors else lines)
    return {term: sentences for term, sentences in told.items() if sentences}


def unscored_reason(inputs: "Inputs") -> str:
    """Say why there are no verdicts."""
    is_undirected = not inputs.protocol.rank and len(inputs.protocol.variants) > MAX_PAIRED
    return NO_PRIMARY if not inputs.primaries else NO_REFERENCE.format(MAX_PAIRED) if is_undirected else NOT_SCORED


def sentences(inputs: "Inputs") -> list[str]:
    said = [f"{line}: one model, run once." for line in same_models(inputs.protocol.shared)]
    said += [f"{term}: {sentence}" for term, group in answer(inputs).items() for sentence in group]
    return list(filter(None, [*said, control_sentence(inputs.control_verdicts)]))


def seed_lines(inputs: "Inputs") -> list[str]:
    lines = []
    for evaluation, primary in inputs.primaries.items():
        of_it = [figure for figure in inputs.figures if figure.evaluation == evaluation]
        found = [*primary_figures(of_it, primary, [figure.variant for figure in of_it]).values()]
        most = max((sum(figure.statuses.values()) for figure in found), default=0)
        if 1 < most <= FEW_SEEDS and len(found) <= MAX_PAIRED:
            shown = "; ".join(f"{it.label} {', '.join(map(format_number, it.values.values()))}" for it in found)
            usual = ("split", "checkpoint", "context")
            place = words.where({name: value for name, value in found[0].settings.items() if name not in usual})
            name = words.metric_name(primary.metric)
            lines.append(f"{', '.join(filter(None, (words.heading(evaluation), name, place)))}: {shown}.")
    return lines


def edge_lines(rates: Sequence[Choice]) -> list[str]:
    return [
        f"{', '.join(filter(None, (words.task(it.evaluation), words.where(it.settings))))}: {it.variant} did best at "
        f"{it.chosen:g}, at the edge of the rates tried; one beyond it may be better."
        for it in rates
        if it.at_edge and it.taken_from is None
    ]


def noise_lines(verdicts: Sequence[Verdict], *, in_looks: bool = False) -> dict[str, list[str]]:
    noise = noise_floor([verdict.pair for verdict in verdicts], in_looks=in_looks)
    lead = "Smallest differences detectable with 80 % power, for the median pair and the worst pair"
    return {"Noise floor": [f"{lead}: {'; '.join(map(words.noise_sentence, noise))}."]} if noise else {}


def beyond_training(figures: Sequence[Figure]) -> dict[str, list[str]]:
    of_text = [name for name in dict.fromkeys(f.evaluation for f in figures) if split_name(name)[0] == "perplexity"]
    on_each = [_perplexity_beyond([f for f in figures if f.evaluation == name], name) for name in of_text]
    sentences = [text for text in (*on_each, _copying_beyond(figures)) if text]
    return {"Beyond training": sentences} if sentences else {}


def by_state(figures: Sequence[Figure], primaries: Mapping[str, Primary]) -> list[str]:
    sentences = []
    for evaluation, primary in primaries.items():
        for points in priced(figures, evaluation, primary, "state_bytes") if primary.higher_is_better else ():
            found = frontier(points, primary)
            if found and len({point.price for point in points}) > 1:
                sentences.append(_most_for_its_state(evaluation, primary, found, has_widths=bool(widths_of(points))))
    return sentences


def _most_for_its_state(evaluation: str, primary: Primary, found: Sequence[Priced], *, has_widths: bool) -> str:
    skipped = ("split", *([WIDTH] if has_widths else []))
    place = words.where({name: value for name, value in found[0].score.settings.items() if name not in skipped})
    names = [f"{it.score.label}{f' at width {it.score.settings[WIDTH]}' if has_widths else ''}" for it in found]
    # Two digits show the margin; fewer would follow from an interval over few seeds.
    parts = [f"{name} {it.value:.2f} in {words.outcome(it.cost)}" for name, it in zip(names, found, strict=True)]
    return (
        f"{words.heading(evaluation)}{place and f' at {place}'}, most for its bytes of state: {'; '.join(parts)}. "
        f"Left out: variants at most {primary.margin:g} better than one with no more state, or than chance. By means, "
        "not tested."
    )


def _perplexity_beyond(figures: Sequence[Figure], evaluation: str) -> str:
    trained = {figure.identity.seq_len for figure in figures}
    # Variants trained at several lengths have no common multiple.
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
    symbols, times = words.symbols(figure.identity for figure in longest), format_number(reached / length)
    where = f"at {reached:,} {symbols}, {times} times the trained length"
    return f"{words.heading(evaluation)} {where}: {_values(longest, descending=False)}."


def _copying_beyond(figures: Sequence[Figure]) -> str:
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
    greatest = max((figure.settings[axis] for figure in figures), default=None)
    longest = [figure for figure in figures if figure.settings[axis] == greatest]
    full = [figure for figure in longest if figure.settings.get("context") == "full"]
    return [figure for figure in full or longest if figure.settings == (full or longest)[0].settings]


def _values(figures: Sequence[Figure], *, descending: bool) -> str:
    ordered = words.by_mean(figures, descending=descending)
    return ", ".join(f"{figure.label} {words.outcome(figure)}" for figure in ordered)
