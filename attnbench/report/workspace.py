"""Results in wandb: a comparison as a run with rows, charts and summary, and a workspace that shows such runs."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from attnbench.report.charts.plots import Plot, plots_of
from attnbench.report.inputs import Inputs, about, read_inputs
from attnbench.report.sections import words
from attnbench.results.corpora import as_measured
from attnbench.results.files import replace_file
from attnbench.results.rows import COLUMNS
from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF, LoggerSettings
from attnbench.training.wandb import (
    LINE_CHART,
    LINE_CHART_FIELDS,
    LineChart,
    WandbMirror,
    choose_mode,
    entity_of,
    wandb_errors,
)
from attnbench.verdict.axes import grouped
from attnbench.verdict.seeds import Figure
from attnbench.verdict.summary import evaluation_class, summary

log = logging.getLogger(__name__)

ROWS = "results"

NAME = "attnbench battery"

VALIDATED = ("nats_per_character", "perplexity", "bits_per_byte")
CURVES = ("loss", *(f"validation/{metric}" for metric in VALIDATED), "learning_rate", "gradient_norm")
"""Metrics of trainings, as WandbMirror names them."""


def show_comparison(folder: Path, settings: LoggerSettings, *, root: Path) -> None:
    """Log the experiment in `folder` as one run of job type `comparison`, in the group of its trainings.

    The run is updated when it is logged again. `root` is the parent folder of wandb/.
    """
    inputs = read_inputs(folder)
    summed = inputs.figures
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
    tables, charts = {ROWS: (COLUMNS, _table(inputs))}, _charts(inputs, summed)
    mirror.show(tables=tables, charts=charts, summary=_summary(summed))
    mirror.close()


def chart_key(evaluation: str, metric: str, axis: str) -> str:
    return f"{evaluation}/{metric}_by_{axis}"


def _table(inputs: Inputs) -> list[list[Any]]:
    lines = []
    for row in as_measured(inputs.rows):
        content = row.to_dict()
        lines.append([*{**content, "settings": json.dumps(content["settings"], sort_keys=True)}.values()])
    return lines


def _charts(inputs: Inputs, summed: Sequence[Figure]) -> dict[str, LineChart]:
    charts = {}
    for evaluation, of_evaluation in grouped(summed, lambda figure: figure.evaluation).items():
        plots = grouped(
            plots_of(of_evaluation, about(evaluation, inputs.protocol).plots), lambda plot: (plot.metric, plot.axis)
        )
        charts |= {chart_key(evaluation, *key): it for key, group in plots.items() if (it := _chart(group)).lines}
    return charts


def _chart(plots: Sequence[Plot]) -> LineChart:
    first, positions = plots[0], list(dict.fromkeys(value for plot in plots for value in plot.positions))
    is_numeric = all(plot.is_numeric for plot in plots)
    lines: dict[str, list[tuple[float, float]]] = {}
    for plot in plots:
        fixed = words.where(plot.fixed) if len(plots) > 1 else ""
        for figure in sorted(plot.figures, key=lambda figure: positions.index(plot.position(figure))):
            if figure.mean is not None:
                value = plot.position(figure)
                x = value if is_numeric else positions.index(value)
                lines.setdefault(", ".join(filter(None, (figure.label, fixed))), []).append((x, figure.mean))
    axis = words.axis_name(first.axis)
    if not is_numeric:
        axis += f" ({', '.join(f'{index}: {value}' for index, value in enumerate(positions))})"
    return LineChart(title=words.capitalized(words.metric_name(first.metric, first.unit)), axis=axis, lines=lines)


def _summary(summed: Sequence[Figure]) -> dict[str, float]:
    content = summary(summed, [])
    return {
        f"{column.evaluation}/{column.header}/{variant}": entry.figure.mean
        for variant, entries in content.lines.items()
        for column, entry in zip(content.columns, entries, strict=True)
        if entry.figure is not None and entry.figure.mean is not None
    }


def make_dashboard(settings: LoggerSettings, output: Path) -> str:
    """Publish the battery's workspace as a saved view of the project, or write it to `output` when offline.

    Returns one line with its place and reason; raises UserError if the library is missing or the server refuses.
    """
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

    def chart(evaluation: str, metric: str, axis: str) -> Any:
        return reports.CustomChart(
            query={"summaryTable": {"tableKey": f"{chart_key(evaluation, metric, axis)}_table"}},
            chart_name=LINE_CHART,
            chart_fields=LINE_CHART_FIELDS,
            chart_strings={"title": _title(metric), "xname": words.axis_name(axis)},
        )

    table = reports.WeavePanelSummaryTable(table_name=ROWS, layout=reports.Layout(w=24, h=9))
    curves = [reports.LinePlot(title=_title(name), x="tokens", y=[name]) for name in CURVES]
    return [
        workspaces.Section(name="Results", panels=[table], is_open=True),
        *(
            workspaces.Section(name=words.heading(name), panels=[chart(name, *plot) for plot in plots], is_open=True)
            for name, plots in _plots().items()
        ),
        workspaces.Section(name="Training", panels=curves, is_open=True),
    ]


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
