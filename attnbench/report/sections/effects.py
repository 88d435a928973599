"""Tables of a factorial: effects of parts on nats, and scores by corner."""

from collections.abc import Mapping, Sequence

from attnbench.report.blocks import Section
from attnbench.report.inputs import Inputs
from attnbench.results.metrics import Primary
from attnbench.results.numbers import format_interval, format_within
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.factorial import Effect, Factorial, by_variant, effects_on_nats
from attnbench.verdict.family import solved_beside
from attnbench.verdict.seeds import Figure

HOW_ESTIMATED = (
    "Least squares with a mean for each corner and a block for each seed; brackets are 95 % intervals from HC3 "
    "standard errors, not adjusted for their number. Below 0 a part helps. A line with a mixer’s name is that "
    "mixer’s difference from the mean over mixers; an interaction of two parts is half of how much the effect of one "
    "changes with the other."
)


def effect_section(inputs: Inputs) -> Section | None:
    protocol = inputs.protocol
    if not protocol.factors:
        return None
    factorial = Factorial.of(protocol.variants, protocol.factors)
    tables = factorial_tables(factorial, inputs.figures, inputs.primaries)
    return Section(title="Effects of the parts", blocks=tables)


def factorial_tables(factorial: Factorial, figures: Sequence[Figure], primaries: Mapping[str, Primary]) -> list[Table]:
    tables = []
    for evaluation, primary in primaries.items():
        of_it = [figure for figure in figures if figure.evaluation == evaluation]
        if primary.kind == "nats":
            tables.append(_effects(factorial, of_it, primary))
        tables.append(_corners(factorial, of_it, primary, evaluation))
    return tables


def _effects(factorial: Factorial, figures: Sequence[Figure], primary: Primary) -> Table:
    estimated = effects_on_nats(factorial, figures, primary)
    notes = estimated.gaps
    if estimated.effects:
        where = f"{len(factorial.levels)} corners and {len(estimated.seeds)} seeds"
        what = f"Means are over {', '.join(estimated.mixers)} at {where}."
        notes = [f"{what} {HOW_ESTIMATED}", *_aliases(factorial), *estimated.gaps]
    return Table(
        title="Effects of parts on nats a character",
        headers=["Effect", "Nats", "Perplexity"],
        lines=[_line(effect) for effect in estimated.effects],
        notes=notes,
    )


def _line(effect: Effect) -> list[str | TableCell]:
    name = f"{effect.name} × {effect.mixer}" if effect.mixer else effect.name
    return [name, _estimate(effect.nats, effect.low, effect.high), _estimate(*effect.in_percent(), unit=" %")]


def _estimate(value: float, low: float, high: float, unit: str = "") -> TableCell:
    return TableCell(text=format_within(value, low, high, "+") + unit, notes=(format_interval(low, high, "+"),))


def _aliases(factorial: Factorial) -> list[str]:
    if not factorial.is_half:
        return []
    first, *rest = factorial.factors
    return [
        f"Half of the corners were run: the effect of a part includes the interaction of all others "
        f"({first} with {' × '.join(rest)}), and of two interactions in one line only the sum is known; "
        "plan.fraction=full runs the other half."
    ]


def _corners(factorial: Factorial, figures: Sequence[Figure], primary: Primary, evaluation: str) -> Table:
    scores = by_variant(figures, primary)
    solved = {name: solved_beside(score, primary, figures) for name, score in scores.items()}
    lines = []
    for high in factorial.levels:
        names = [factorial.variant(mixer, high) for mixer in factorial.mixers]
        label = ", ".join(part for part in factorial.factors if part in high) or "none of the parts"
        lines.append([label, *(_corner(scores.get(name), solved.get(name)) for name in names)])
    what = "share solved, mean accuracy" if any(solved.values()) else primary.metric.replace("_", " ")
    return Table(title=f"Corners: {evaluation}, {what}", headers=["Parts", *factorial.mixers], lines=lines)


def _corner(score: Figure | None, solved: Figure | None) -> str | TableCell:
    if score is None:
        return TableCell(text="not measured", mark="lost")
    if score.mean is None:
        return TableCell(text=score.obstacle or next(iter(score.statuses)), mark="lost")
    if solved is None or not solved.values:
        return f"{score.text}, {score.num_diverged} diverged" if score.num_diverged else score.text
    num_solved = sum(solved.values.values())
    return f"{num_solved:.0f} of {len(solved.values)}, {score.number or NOTHING}"
