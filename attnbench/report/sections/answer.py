"""The answer of a comparison in a few lines, equal on a page and a terminal: which variant is better, by how much."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnbench.report.sections import words
from attnbench.report.sections.corpus_table import corpora_lines
from attnbench.report.sections.surroundings import EQUAL, equal_parts, surroundings
from attnbench.report.sections.verdicts import verdict_lines
from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.numbers import format_number
from attnbench.settings.schema import MAX_PAIRED
from attnbench.verdict.axes import grouped
from attnbench.verdict.control import control_sentence
from attnbench.verdict.costs import WIDTH, Priced, frontier, priced, widths_of
from attnbench.verdict.ranking import Verdict, noise_floor
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import Figure, is_accuracy, same_models
from attnbench.verdict.summary import Column, headline_columns

if TYPE_CHECKING:
    # Imported here: it loads torch, and commands check their settings first.
    from attnbench.report.inputs import Inputs

FULL_LENGTHS = 8
"""Multiple of the trained length whose perplexity is in the answer."""

UNMATCHED = 0.1
"""Share of parameters that a variant has more or fewer, from which the answer says so."""

LEFT_OUT = (
    "A variant is left out if another with no more state, or guessing, is as good within the margin. By means, not "
    "tested."
)
NOT_TESTED = "Not tested"
UNFINISHED = "The plan is not finished: verdicts are on the finished runs and may change."
NO_PRIMARY = "Nothing is compared: no evaluation here has a primary metric, on which verdicts are based."
NO_REFERENCE = "Nothing is compared: more than {} variants need a reference, which a plan names (plan.reference)."
NOT_SCORED = "Fewer than two variants were scored in an evaluation with a primary metric."


def answer(inputs: "Inputs") -> dict[str, list[str]]:
    """By topic; empty topics are left out. For a factorial, the tables of effects are the answer."""
    protocol, verdicts = inputs.protocol, inputs.verdicts
    unfinished = {"Unfinished": [UNFINISHED] if protocol.missing else []}
    described = {NOT_TESTED: list(protocol.descriptive), "Learning rates": edge_lines(protocol.rates)}
    unscored = {} if protocol.descriptive else {"No verdict": [unscored_reason(inputs)]}
    lines = {
        **corpora_lines(verdicts),
        **(verdict_lines(verdicts) if verdicts else unscored),
        **described,
        "Seed by seed": [] if protocol.rank or protocol.factors else seed_lines(inputs),
        **noise_lines(verdicts, in_looks=protocol.in_looks),
        **beyond_training(inputs.figures, inputs.primaries),
        "Bytes of state": by_state(inputs.figures, inputs.primaries),
        "Parameters": size_lines(inputs),
        "Around the mixers": surroundings(inputs.rows),
    }
    told = unfinished | (described if protocol.factors else lines)
    return {term: sentences for term, sentences in told.items() if sentences}


def unscored_reason(inputs: "Inputs") -> str:
    """Say why there are no verdicts."""
    is_undirected = not inputs.protocol.rank and len(inputs.protocol.variants) > MAX_PAIRED
    return NO_PRIMARY if not inputs.primaries else NO_REFERENCE.format(MAX_PAIRED) if is_undirected else NOT_SCORED


def sentences(inputs: "Inputs") -> list[str]:
    said = failure_lines(inputs.protocol.failures)
    said += [f"{line}: one model, run once." for line in same_models(inputs.protocol.shared)]
    said.append(EQUAL + equal_parts(inputs.rows, inputs.figures, inputs.protocol.rates))
    said += [it if term == NOT_TESTED else f"{term}: {it}" for term, group in answer(inputs).items() for it in group]
    return list(filter(None, [*said, control_sentence(inputs.control_verdicts)]))


def failure_lines(failures: Sequence[Mapping[str, str]]) -> list[str]:
    by_reason = grouped(failures, lambda failure: failure["reason"])
    return [
        f"{of_it[0]['cell']} failed{f', and {len(of_it) - 1} more' * (len(of_it) > 1)}: {reason.rstrip('.')}."
        for reason, of_it in by_reason.items()
    ]


def seed_lines(inputs: "Inputs") -> list[str]:
    """One sentence for each evaluation of few seeds and few variants: means and seeds of its hardest score."""
    lines = []
    for evaluation, primary in inputs.primaries.items():
        of_it = [figure for figure in inputs.figures if figure.evaluation == evaluation]
        column = primary_column(of_it, primary)
        taken = [figure for figure in of_it if column is not None and column.takes(figure)]
        if column is not None and len(taken) <= MAX_PAIRED and any(figure.is_of_few for figure in taken):
            lines.append(words.plain_answer(taken, column, primary))
    return lines


def primary_column(figures: Sequence[Figure], primary: Primary) -> Column | None:
    """Return the hardest column that the primary metric judges."""
    columns = headline_columns(figures, figures[0].evaluation) if figures else []
    judged = [
        it for it in columns if it.judged_by == primary.metric and primary.settings.items() <= it.settings.items()
    ]
    return max(judged, key=lambda column: primary.hardness(column.settings), default=None)


def size_lines(inputs: "Inputs") -> list[str]:
    """Say whose models have a size that matching could not give them, beside the reference's or the first variant's."""
    found: dict[str, dict[str, str]] = {}
    sizes = [it for it in inputs.figures if it.metric == "parameters" and it.mean]
    first = inputs.protocol.reference or next((it.variant for it in sizes), "")
    for of_it in grouped(sizes, lambda figure: figure.key).values():
        base = next((it.mean for it in of_it if first in it.names), None)
        for it in of_it:
            share = it.mean / base - 1 if it.mean and base else 0.0
            if abs(share) > UNMATCHED:
                told = f"{100 * abs(share):.0f} % {'fewer' if share < 0 else 'more'}"
                found.setdefault(it.label, {})[it.evaluation] = f"{told} in {words.task(it.evaluation).lower()}"
    return [f"{label} has {words.listed(of_it.values())} than {first}." for label, of_it in found.items()]


def edge_lines(rates: Sequence[Choice]) -> list[str]:
    return [
        f"{', '.join(filter(None, (words.task(it.evaluation), words.where(it.settings))))}: {it.variant} did best at "
        f"{it.chosen:g}, at the edge of the rates tried; one beyond it may be better."
        for it in rates
        if it.at_edge
    ]


def noise_lines(verdicts: Sequence[Verdict], *, in_looks: bool = False) -> dict[str, list[str]]:
    noise = noise_floor([verdict.pair for verdict in verdicts], in_looks=in_looks)
    lead = "Smallest differences detectable with 80 % power, for the median pair and the worst pair"
    return {"Detectable": [f"{lead}: {'; '.join(map(words.noise_sentence, noise))}."]} if noise else {}


def beyond_training(figures: Sequence[Figure], primaries: Mapping[str, Primary]) -> dict[str, list[str]]:
    of_text = [name for name in dict.fromkeys(f.evaluation for f in figures) if split_name(name)[0] == "perplexity"]
    on_each = [_perplexity_beyond([f for f in figures if f.evaluation == it], it, primaries.get(it)) for it in of_text]
    sentences = [text for text in (*on_each, _copying_beyond(figures, primaries.get("copy"))) if text]
    return {"Beyond training": sentences} if sentences else {}


def by_state(figures: Sequence[Figure], primaries: Mapping[str, Primary]) -> list[str]:
    """Name the variants that score most for their bytes of state, by means; see `frontier`."""
    sentences = []
    for evaluation, primary in primaries.items():
        for points in priced(figures, evaluation, primary, "state_bytes") if primary.higher_is_better else ():
            found = frontier(points, primary)
            if found and len({point.price for point in points}) > 1:
                sentences.append(_most_for_its_state(evaluation, primary, found, has_widths=bool(widths_of(points))))
    return [*sentences, LEFT_OUT] if sentences else []


def _most_for_its_state(evaluation: str, primary: Primary, found: Sequence[Priced], *, has_widths: bool) -> str:
    skipped = ("split", *([WIDTH] if has_widths else []))
    place = words.where({name: value for name, value in found[0].score.settings.items() if name not in skipped})
    names = [f"{it.score.label}{f' at width {it.score.settings[WIDTH]}' if has_widths else ''}" for it in found]
    unit = " %" if is_accuracy(primary.metric) else ""
    parts = [
        f"{name} {words.score(it.score, primary)}{unit} with {words.outcome(it.cost)} bytes"
        for name, it in zip(names, found, strict=True)
    ]
    return f"{words.heading(evaluation)}{place and f' at {place}'}, best for its bytes of state: {'; '.join(parts)}."


def _perplexity_beyond(figures: Sequence[Figure], evaluation: str, primary: Primary | None) -> str:
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
    return f"{words.heading(evaluation)} {where}: {_values(longest, primary)}."


def _copying_beyond(figures: Sequence[Figure], primary: Primary | None) -> str:
    copied = [figure for figure in figures if (figure.evaluation, figure.metric) == ("copy", "symbol_accuracy")]
    trained = max((f.settings["length"] for f in copied if not f.settings.get("beyond_training")), default=0)
    beyond = [figure for figure in copied if figure.settings.get("beyond_training")]
    if not trained or not beyond:
        return ""
    length = min((figure.settings["length"] for figure in beyond), key=lambda length: abs(length - 2 * trained))
    at_length = [figure for figure in beyond if figure.settings["length"] == length]
    times = f"{format_number(length / trained)} times the trained length"
    return f"Copying {length:,} symbols, {times}: {_values(at_length, primary)}."


def _longest(figures: Sequence[Figure], axis: str) -> list[Figure]:
    greatest = max((figure.settings[axis] for figure in figures), default=None)
    longest = [figure for figure in figures if figure.settings[axis] == greatest]
    full = [figure for figure in longest if figure.settings.get("context") == "full"]
    return [figure for figure in full or longest if figure.settings == (full or longest)[0].settings]


def _values(figures: Sequence[Figure], primary: Primary | None) -> str:
    is_share = is_accuracy(figures[0].metric)
    ordered = words.by_mean(figures, descending=is_share)
    return ", ".join(
        f"{it.label} {words.score(it, primary)}{' %' * (is_share and it.mean is not None)}" for it in ordered
    )
