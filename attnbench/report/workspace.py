"""Results in wandb: a comparison as a run with rows, charts and summary, and a workspace that shows such runs."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from attnbench.report.charts.plots import Plot, plots_of
from attnbench.report.inputs import Inputs, about, read_inputs
from attnbench.report.sections import words
from attnbench.report.sections.answer import sentences
from attnbench.report.sections.scores import outcome_of
from attnbench.results.corpora import as_measured
from attnbench.results.files import replace_file
from attnbench.results.rows import COLUMNS
from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF, LoggerSettings
from attnbench.training.wandb import BARS, FIELDS, LINES, Chart, WandbMirror, choose_mode, entity_of, wandb_errors
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.summary import Summary, evaluation_class, summary

log = logging.getLogger(__name__)

SCORES, VERDICTS, ANSWER, ROWS = TABLES = ("scores", "verdicts", "answer", "results")
"""Tables of a comparison: variants x scores, tested pairs, the answer in sentences, and every measured number."""

NAME = "attnbench battery"

VALIDATED = ("nats_per_character", "perplexity", "bits_per_byte")
CURVES = ("loss", *(f"validation/{metric}" for metric in VALIDATED), "learning_rate", "gradient_norm")
"""Metrics of trainings, as WandbMirror names them."""
BY_LENGTH = (*(f"validation/{metric}" for metric in VALIDATED), "tokens_per_second")
"""Last numbers of trainings that a sweep over seq_len shows by it."""

OF_VERDICT = ("difference", "low", "high", "p_value", "adjusted_p_value", "num_seeds", "reason")
VERDICT_COLUMNS = ("evaluation", "metric", "first", "verdict", "second", *OF_VERDICT)


def show_comparison(
    folder: Path, settings: LoggerSettings, *, root: Path, report: Path | None = None, inputs: Inputs | None = None
) -> None:
    """Log the experiment in `folder` as one run of job type `comparison`, in the group of its trainings.

    The run is updated when it is logged again. `root` is the parent folder of wandb/, `report` a folder that becomes an
    artifact of the run, `inputs` those of the folder, if already read.
    """
    inputs = read_inputs(folder) if inputs is None else inputs
    content = summary(inputs.figures, [], inputs.protocol.variants)
    plan = inputs.protocol.plan
    protocol = asdict(inputs.protocol)
    names = ("plan", "command", "variants", "rank", "reference", "rates", "failures")
    mirror = WandbMirror(
        settings,
        root=root,
        run_id=f"{plan}-comparison",
        folder=folder,
        name=plan,
        group=plan,
        job_type="comparison",
        config={name: protocol[name] for name in names},
        resume=True,
    )
    log.info(mirror.notice)
    scores, variants = _scores(content), list(content.lines)
    lines = zip(variants, *scores.values(), strict=True)
    tables = {
        SCORES: (("variant", *scores), [[*line] for line in lines]),
        VERDICTS: (VERDICT_COLUMNS, [_line_of(verdict) for verdict in inputs.verdicts]),
        ANSWER: (("answer",), [[sentence] for sentence in sentences(inputs)]),
        ROWS: (COLUMNS, _table(inputs)),
    }
    cells = {f"{score}/{name}": it for score, means in scores.items() for name, it in zip(variants, means, strict=True)}
    mirror.show(
        tables=tables,
        charts=_bars(content) | _charts(inputs),
        summary={name: mean for name, mean in cells.items() if mean is not None},
        report=report,
    )
    mirror.close()


def chart_key(evaluation: str, metric: str, axis: str) -> str:
    return f"{evaluation}/{metric}_by_{axis}"


def score_key(evaluation: str) -> str:
    return f"{evaluation}/score_by_variant"


def _scores(content: Summary) -> dict[str, list[float | None]]:
    """Means of the variants, in their order, by score."""
    entries = zip(*content.lines.values(), strict=True)
    return {
        f"{column.evaluation}/{column.header}": [it.figure.mean if it.figure is not None else None for it in of_all]
        for column, of_all in zip(content.columns, entries, strict=True)
    }


def _line_of(verdict: Verdict) -> list[Any]:
    pair, numbers = verdict.pair, [getattr(verdict, name) for name in OF_VERDICT]
    # The open end of an interval: JSON has no infinity.
    finite = [None if it in (math.inf, -math.inf) else it for it in numbers]
    return [pair.evaluation, pair.primary.metric, pair.first, outcome_of(verdict) or "none", pair.second, *finite]


def _table(inputs: Inputs) -> list[list[Any]]:
    lines = []
    for row in as_measured(inputs.rows):
        content = row.to_dict()
        lines.append([*{**content, "settings": json.dumps(content["settings"], sort_keys=True)}.values()])
    return lines


def _bars(content: Summary) -> dict[str, Chart]:
    """Draw the first score of each evaluation."""
    charts = {}
    for index, column in enumerate(content.columns):
        figures = {variant: entries[index].figure for variant, entries in content.lines.items()}
        points = [[variant, it.mean] for variant, it in figures.items() if it is not None and it.mean is not None]
        if points:
            title = words.capitalized(column.header)
            charts.setdefault(score_key(column.evaluation), Chart(kind=BARS, strings={"title": title}, points=points))
    return charts


def _charts(inputs: Inputs) -> dict[str, Chart]:
    charts = {}
    for evaluation, of_evaluation in grouped(inputs.figures, lambda figure: figure.evaluation).items():
        plots = grouped(
            plots_of(of_evaluation, about(evaluation, inputs.protocol).plots), lambda plot: (plot.metric, plot.axis)
        )
        charts |= {chart_key(evaluation, *key): it for key, group in plots.items() if (it := _chart(group)).points}
    return charts


def _chart(plots: Sequence[Plot]) -> Chart:
    first, positions = plots[0], list(dict.fromkeys(value for plot in plots for value in plot.positions))
    is_numeric = all(plot.is_numeric for plot in plots)
    points = []
    for plot in plots:
        fixed = words.where(plot.fixed) if len(plots) > 1 else ""
        for figure in sorted(plot.figures, key=lambda figure: positions.index(plot.position(figure))):
            if figure.mean is not None:
                value = plot.position(figure)
                x = value if is_numeric else positions.index(value)
                points.append([x, ", ".join(filter(None, (figure.label, fixed))), figure.mean])
    axis = words.axis_name(first.axis)
    if not is_numeric:
        axis += f" ({', '.join(f'{index}: {value}' for index, value in enumerate(positions))})"
    title = words.capitalized(words.metric_name(first.metric, first.unit))
    return Chart(kind=LINES, strings={"title": title, "xname": axis}, points=points)


def make_dashboard(settings: LoggerSettings, output: Path) -> str:
    """Publish the battery's workspace as a saved view of the project, or write it to `output` when offline. Return one
    line with its place and reason."""
    workspaces, _ = _library()
    mode, reason = choose_mode(settings)
    if mode != "online":
        entity = settings.entity or ""
        workspace = workspaces.Workspace(name=NAME, entity=entity, project=settings.project, sections=_sections())
        # The library has no public function for the content that it would send.
        content = workspace._to_model().spec.model_dump(by_alias=True, exclude_none=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, json.dumps(content, indent=1) + "\n")
        return f"dashboard: {output}, not published: {reason}"
    try:
        entity = entity_of(settings)
        workspace = workspaces.Workspace(name=NAME, entity=entity, project=settings.project, sections=_sections())
        return f"dashboard: {workspace.save().url}"
    except (*wandb_errors(), ValueError) as error:
        raise UserError(f"wandb refused the dashboard: {str(error).strip().partition(chr(10))[0]}") from error


def _sections() -> list[Any]:
    workspaces, reports = _library()

    def chart(kind: str, key: str, **strings: str) -> Any:
        return reports.CustomChart(
            query={"summaryTable": {"tableKey": f"{key}_table"}},
            chart_name=kind,
            chart_fields={field: field for field in FIELDS[kind]},
            chart_strings=strings,
        )

    def charts(evaluation: str, plots: Sequence[tuple[str, str]]) -> list[Any]:
        lines = [
            chart(LINES, chart_key(evaluation, *it), title=_title(it[0]), xname=words.axis_name(it[1])) for it in plots
        ]
        return [chart(BARS, score_key(evaluation), title="Score"), *lines]

    wide = reports.Layout(w=24, h=9)
    tables = [reports.WeavePanelSummaryTable(table_name=name, layout=wide) for name in TABLES]
    curves = [reports.LinePlot(title=_title(name), x="tokens", y=[name]) for name in CURVES]
    length = reports.Config("seq_len")
    by_length = [reports.ScatterPlot(title=_title(it), x=length, y=reports.SummaryMetric(it)) for it in BY_LENGTH]
    sections = {
        "Results": tables,
        **{words.heading(name): charts(name, plots) for name, plots in _plots().items()},
        "Training": curves,
        "Trained length": by_length,
    }
    return [workspaces.Section(name=name, panels=panels, is_open=True) for name, panels in sections.items()]


def _plots() -> dict[str, Sequence[tuple[str, str]]]:
    battery = yaml.safe_load((CONF / "eval" / "battery.yaml").read_text(encoding="utf-8"))["defaults"]
    names = dict.fromkeys([*battery, *(path.stem for path in sorted((CONF / "eval").glob("*.yaml")))])
    classes = {name: evaluation_class(name) for name in names}
    return {name: cls.plots for name, cls in classes.items() if cls is not None}


def _title(metric: str) -> str:
    return words.capitalized(words.metric_name(metric.replace("/", " ")))


def _library() -> tuple[Any, Any]:
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ImportError:
        raise UserError("the dashboard needs wandb-workspaces: pip install 'wandb-workspaces>=0.4,<0.5'") from None
    return workspaces, v2
