"""Charts of trainings: scores by learning rate, and curves by seed; and samples of text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.report.blocks import Block, Note, Picture, Pictures, Sample, Samples, Section, file_name
from attnbench.report.charts.marks import Axis, Datum, Drawing, position_axis, value_axis
from attnbench.report.charts.vega import draw
from attnbench.report.inputs import Inputs
from attnbench.report.sections import words
from attnbench.results.corpora import on_corpus, split_name
from attnbench.results.metrics import DEFINITIONS, Primary
from attnbench.results.rows import TRAINING, ResultRow, is_search
from attnbench.results.tables import NOTHING, Table
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import read_object
from attnbench.training.log import stream_metrics
from attnbench.training.sample import SAMPLE
from attnbench.verdict.axes import axes, grouped
from attnbench.verdict.family import primary_figures
from attnbench.verdict.rates import Choice, rate_dots
from attnbench.verdict.seeds import Figure

MAX_POINTS = 60
"""Most points of a learning curve; longer curves are thinned evenly."""

MAX_TEXT = 1_000

FEW = 5
"""With fewer validations, the curve of a language model of characters is its training loss."""

ABOUT_SEARCH = (
    "Mean validation scores, of seeds that are not scored afterwards: accuracy, or nats per character of language "
    "models (lower is better). A dot is a seed, a line their mean, a ring the chosen rate."
)

STAGED = "line: after one epoch; separate dots: full trainings"

WARM_SHARE = 0.1
"""Share of first steps whose loss may be above the plot."""


def rate_section(inputs: Inputs, primaries: Mapping[str, Primary], variants: Sequence[str]) -> Section | None:
    """Draw scores by rate at the hardest searched task of each evaluation; list all rates and how they were found."""
    rates = inputs.protocol.rates or _used(inputs.rows)
    if not rates:
        return None
    searched = [rate for rate in rates if len(rate.grid) > 1]
    pictures = []
    for evaluation, group in grouped(searched, lambda rate: rate.evaluation).items():
        primary = primaries.get(evaluation)
        hardest = max((it.settings for it in group), key=primary.hardness) if primary else group[0].settings
        pictures.append(_rate_picture([it for it in group if it.settings == hardest], variants))
    blocks: list[Block] = [Note(ABOUT_SEARCH), Pictures(pictures)] if pictures else []
    return Section(title="Learning rates", blocks=[*blocks, _rates(rates, is_searched=bool(searched))])


def _used(rows: Sequence[ResultRow]) -> list[Choice]:
    """Return the rates of rows without the record of a comparison."""
    found: dict[tuple[str, str, float], Choice] = {}
    for row in rows:
        settings, identity = row.measurement.settings, row.identity
        rate = settings.get("learning_rate")
        if rate is not None and not is_search(identity.seed):
            named = {"variant": identity.variant, "evaluation": identity.evaluation, "chosen": rate}
            choice = Choice(**named, settings={}, grid=[], scores={}, at_edge=bool(settings.get("rate_at_edge")))
            found.setdefault((identity.variant, identity.evaluation, rate), choice)
    return [*found.values()]


def _rate_picture(group: Sequence[Choice], variants: Sequence[str]) -> Picture:
    first = group[0]
    is_staged = any(rate.after_an_epoch for rate in group)
    lines = [
        {"variant": rate.variant, "x": float(name), "value": score}
        for rate in group
        for name, score in (rate.after_an_epoch or rate.scores).items()
        if score is not None
    ]
    dots = [{"variant": rate.variant, "x": at, "value": score} for rate in group for at, score in rate_dots(rate.seeds)]
    rings = [
        {"variant": rate.variant, "x": rate.chosen, "value": rate.scores[f"{rate.chosen:g}"]}
        for rate in group
        if rate.scores.get(f"{rate.chosen:g}") is not None
    ]
    grid = sorted({value for rate in group for value in rate.grid})
    values = [datum["value"] for datum in (*lines, *dots)]
    what = "nats per character" if _is_training(first.evaluation) else "validation accuracy"
    task = words.where(first.settings)
    title = f"{words.task(first.evaluation)}: {what} by learning rate" + (f", {task}" if task else "")
    failed = [f"{rate.variant} at {name}" for rate in group for name, score in rate.scores.items() if score is None]
    chosen = [f"{rate.variant} {rate.chosen:g}" for rate in group]
    drawing = Drawing(
        description=f"{title}; chosen: {', '.join(chosen)}.",
        labels={rate.variant: rate.variant for rate in group},
        x=position_axis(grid, "learning rate"),
        y=value_axis(values) if _is_training(first.evaluation) else Axis(domain=(0, 1)),
        lines=lines,
        dots=dots,
        rings=rings,
    )
    return Picture(
        name=file_name("rates", first.evaluation, settings=first.settings),
        title=title,
        spec=draw(drawing, variants),
        description=drawing.description,
        legend="; ".join(filter(None, (words.validated_on(first.evaluation), STAGED * is_staged))),
        missing=f"every seed diverged: {'; '.join(failed)}" if failed else "",
    )


def _is_training(evaluation: str) -> bool:
    return split_name(evaluation)[0] == TRAINING


def _rates(rates: Sequence[Choice], *, is_searched: bool) -> Table:
    """Variants with one rate of a task, found alike, share a line."""

    def written(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.2g}"

    lines: dict[tuple[str, ...], list[str]] = {}
    for rate in rates:
        widths = [written(rate.rate_window), written(rate.rate_sensitivity)] if is_searched else []
        lines.setdefault((*_rate_line(rate), *widths), []).append(rate.variant)
    headers = ["Variant", "Task", "Rate", "Found by"]
    notes = []
    if is_searched:
        headers += ["Rate window (decades)", "Rate sensitivity"]
        defined = (f"{name.replace('_', ' ')}: {DEFINITIONS[name]}" for name in ("rate_window", "rate_sensitivity"))
        notes = [f"{words.capitalized('; '.join(defined))}. {NOTHING}: not searched."]
    cells = [[words.listed(names), *line] for line, names in lines.items()]
    return Table(title="All rates", headers=headers, lines=cells, num_labels=4, notes=notes)


def _rate_line(rate: Choice) -> tuple[str, str, str]:
    """Return the task of a rate, the rate, and how it was found, with the mean validation scores of those tried."""
    task = ", ".join(filter(None, (words.task(rate.evaluation), words.where(rate.settings))))
    if len(rate.grid) > 1:
        scores = {**rate.after_an_epoch, **rate.scores}
        shown = [f"{name}: {'diverged' if it is None else f'{it:.3g}'}" for name, it in scores.items()]
        found = f"the best of {', '.join(shown)}"
    else:
        found = "no search: the only one given" if rate.grid else "not recorded"
    return task, f"{rate.chosen:g}", f"{found}; at the edge of those tried" if rate.at_edge else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    variant: str
    seed: int
    steps: list[int]
    values: list[float]


def curve_section(
    inputs: Inputs, figures: Sequence[Figure], primaries: Mapping[str, Primary], variants: Sequence[str]
) -> Section | None:
    scored = [row for row in inputs.rows if row.identity.run in inputs.folders and not is_search(row.identity.seed)]
    groups = grouped(scored, lambda row: row.identity.run)
    pictures = []
    trainings = [row.identity.evaluation for row in inputs.rows if _is_training(row.identity.evaluation)]
    for evaluation in dict.fromkeys([*trainings, *primaries]):
        score = _settings_of(evaluation, figures, primaries)
        trained = [rows for rows in groups.values() if any(_is_of(row, evaluation, score) for row in rows)]
        is_text = _is_training(evaluation)
        curves = [c for rows in trained if (c := _curve(inputs.folders[rows[0].identity.run], rows, is_text))]
        if curves:
            pictures.append(_curve_picture(evaluation, score, curves, variants))
    about = "One line per seed."
    return Section(title="Learning curves", blocks=[Note(about), Pictures(pictures)]) if pictures else None


def _settings_of(
    evaluation: str, figures: Sequence[Figure], primaries: Mapping[str, Primary]
) -> tuple[str, dict[str, Any]] | None:
    if _is_training(evaluation):
        return None
    of_it = [figure for figure in figures if figure.evaluation == evaluation]
    scores = primary_figures(of_it, primaries[evaluation], [figure.variant for figure in of_it])
    return next(((figure.metric, figure.settings) for figure in scores.values()), None)


def _is_of(row: ResultRow, evaluation: str, score: tuple[str, dict[str, Any]] | None) -> bool:
    if row.identity.evaluation != evaluation:
        return False
    if score is None:
        return _is_training(evaluation)
    # Options of an evaluation are settings of figures only if they differ.
    return row.measurement.metric == score[0] and axes(row.measurement.settings).items() <= score[1].items()


def _curve(folder: Path, rows: Sequence[ResultRow], is_text: bool) -> Curve | None:
    path, identity = folder / "metrics.jsonl", rows[0].identity
    # The loss is in nats per token.
    has_losses = is_text and words.symbols([identity]) == "characters"
    if not path.exists():
        return None
    checked: list[tuple[int, float]] = []
    losses: list[tuple[int, float]] = []
    for entry in stream_metrics(path):
        name = "nats_per_character" if is_text else "selection"
        for kind, value in ((checked, entry.get(name)), (losses, entry.get("loss") if has_losses else None)):
            if isinstance(value, int | float) and abs(value) < float("inf"):
                kind.append((entry["step"], float(value)))
    points = losses if has_losses and len(checked) < FEW else checked
    if len(points) < 2:
        return None
    kept = [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
    steps, values = zip(*(kept if len(points) > MAX_POINTS else points), strict=True)
    return Curve(variant=identity.variant, seed=identity.seed, steps=list(steps), values=list(values))


def _curve_picture(
    evaluation: str, score: tuple[str, dict[str, Any]] | None, curves: Sequence[Curve], variants: Sequence[str]
) -> Picture:
    lines: list[Datum] = [
        # Four digits are visible in a line.
        {"variant": curve.variant, "line": f"{curve.variant} {curve.seed}", "x": step, "value": float(f"{value:.4g}")}
        for curve in curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    last = max(curve.steps[-1] for curve in curves)
    late = [datum["value"] for datum in lines if datum["x"] >= WARM_SHARE * last]
    skipped = ("split", "length", "beyond_training")
    task = words.where({name: value for name, value in score[1].items() if name not in skipped}) if score else ""
    title = f"{words.task(evaluation)}: {'validation accuracy' if score else 'nats per character'} by step"
    ends = [f"{c.variant} seed {c.seed} {c.values[-1]:.3g} after {c.steps[-1]:,} steps" for c in curves]
    drawing = Drawing(
        description=f"{title}; {'; '.join(ends[:20])}.",
        labels={curve.variant: curve.variant for curve in curves},
        x=Axis(title="step", domain=(0, last)),
        y=Axis(domain=(0, 1)) if score else Axis(domain=(min(late), max(late))),
        lines=lines,
        is_thin=True,
    )
    return Picture(
        name=file_name("curves", evaluation),
        title=title,
        spec=draw(drawing, variants),
        description=drawing.description,
        legend="; ".join(filter(None, (task, words.validated_on(evaluation)))),
    )


def sample_section(inputs: Inputs) -> Section | None:
    shown: dict[str, Sample] = {}
    runs = {row.identity.run: row.identity for row in inputs.rows if _is_training(row.identity.evaluation)}
    for run, identity in sorted(runs.items(), key=lambda item: str(item[1].seed).zfill(8)):
        path = inputs.folders.get(run, Path()) / SAMPLE
        if run not in inputs.folders or is_search(identity.seed) or identity.variant in shown or not path.exists():
            continue
        content = read_object(path, "you may remove the file: it contains only a sample of text")
        prompt, text = content.get("prompt"), content.get("text")
        if not isinstance(prompt, str) or not isinstance(text, str):
            raise UserError(f"{path}: is not a sample of text; you may remove the file")
        label = on_corpus(f"{identity.variant}, seed {identity.seed}", split_name(identity.evaluation)[1])
        shown[identity.variant] = Sample(label=label, prompt=prompt[:MAX_TEXT], text=text[:MAX_TEXT])
    order = {name: index for index, name in enumerate(inputs.protocol.variants)}
    samples = sorted(shown.items(), key=lambda item: order.get(item[0], len(order)))
    about = "Continuations of the same characters of the validation split, which come first, with equal random numbers."
    blocks: list[Block] = [Note(about), Samples([sample for _, sample in samples])]
    return Section(title="Samples of text", blocks=blocks) if samples else None
