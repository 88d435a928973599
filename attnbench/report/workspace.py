"""A workspace in wandb for the battery: a section an evaluation with its plots, the rows, the curves of trainings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from attnbench.evals.base import Evaluation
from attnbench.report import words
from attnbench.report.wandb import ROWS, chart_key
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF, LoggerSettings
from attnbench.training.wandb import LINE_CHART, LINE_CHART_FIELDS, choose_mode, entity_of, wandb_errors

NAME = "attnbench battery"

CURVES = ("loss", "validation/nats_per_character", "validation/perplexity", "learning_rate", "gradient_norm")
"""What a training logs, as the mirror calls it."""


def make_dashboard(settings: LoggerSettings, output: Path) -> str:
    """Publishes the workspace as a saved view of the project, or writes it to `output` where it cannot go online.

    Returns:
        One line: where it is, and why there.

    Raises:
        UserError: the library is missing, mode online is asked for and cannot be, or the server refuses.
    """
    workspaces, _ = _library()
    mode, reason = choose_mode(settings)
    if mode != "online":
        workspace = workspaces.Workspace(
            name=NAME, entity=settings.entity or "", project=settings.project, sections=_sections()
        )
        # What the library would send; it has no public word for it.
        content = workspace._to_model().spec.model_dump(by_alias=True, exclude_none=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, json.dumps(content, indent=1) + "\n")
        return f"dashboard: {output}, not published: {reason}"
    try:
        entity = entity_of(settings)
        workspace = workspaces.Workspace(name=NAME, entity=entity, project=settings.project, sections=_sections())
        return f"dashboard: {workspace.save().url}"
    except (*wandb_errors(), ValueError) as error:
        raise UserError(f"wandb did not take the dashboard: {str(error).strip().partition(chr(10))[0]}") from error


def _sections() -> list[Any]:
    """All rows first, then the evaluations as the battery lists them, then trainings."""
    workspaces, reports = _library()
    table = reports.WeavePanelSummaryTable(table_name=ROWS, layout=reports.Layout(w=24, h=9))
    curves = [reports.LinePlot(title=_title(name), x="tokens", y=[name]) for name in CURVES]
    return [
        workspaces.Section(name="Results", panels=[table], is_open=True),
        *(
            workspaces.Section(name=words.heading(name), panels=_charts(name, plots), is_open=True)
            for name, plots in _plots().items()
        ),
        workspaces.Section(name="Training", panels=curves, is_open=True),
    ]


def _charts(evaluation: str, plots: Sequence[tuple[str, str]]) -> list[Any]:
    """The charts that a comparison logs of an evaluation."""
    _, reports = _library()
    return [
        reports.CustomChart(
            query={"summaryTable": {"tableKey": f"{chart_key(evaluation, metric, axis)}_table"}},
            chart_name=LINE_CHART,
            chart_fields=LINE_CHART_FIELDS,
            chart_strings={"title": _title(metric), "xname": words.axis_name(axis)},
        )
        for metric, axis in plots
    ]


def _plots() -> dict[str, Sequence[tuple[str, str]]]:
    """What each evaluation of conf/eval draws: those of the battery in its order, then the others."""
    contents = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted((CONF / "eval").glob("*.yaml"))}
    names = dict.fromkeys([*contents["battery"]["defaults"], *contents])
    targets = {name: contents[name]["_target_"] for name in names if "_target_" in contents[name]}
    return {name: resolve(target, Evaluation).plots for name, target in targets.items()}


def _title(metric: str) -> str:
    return words.capitalized(words.metric_name(metric.replace("/", " ")))


def _library() -> tuple[Any, Any]:
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ImportError:
        raise UserError("the dashboard needs wandb-workspaces: pip install 'wandb-workspaces>=0.4,<0.5'") from None
    return workspaces, v2
