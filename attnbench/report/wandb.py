"""A comparison in wandb: one run with all rows as a table, each evaluation's plots as charts, and the summary."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnbench.report import words
from attnbench.report.inputs import Inputs, about, read_inputs
from attnbench.report.plots import Plot, plots_of
from attnbench.results.rows import COLUMNS
from attnbench.settings.schema import LoggerSettings
from attnbench.training.wandb import LineChart, WandbMirror
from attnbench.verdict.ranking import families
from attnbench.verdict.seeds import Figure, figures
from attnbench.verdict.summary import summary

log = logging.getLogger(__name__)

ROWS = "results"
"""The key of the table of all rows."""


def show_comparison(folder: Path, settings: LoggerSettings, *, root: Path) -> None:
    """Shows the experiment in `folder` as one run of job type `comparison`, in the group of its trainings.

    The same folder is the same run: shown again, it is updated.

    Args:
        root: the folder that gets wandb/.

    Raises:
        UserError: as WandbMirror, or for an experiment that read_inputs refuses.
    """
    inputs = read_inputs(folder)
    summed = figures(inputs.rows, inputs.protocol.shared)
    plan = inputs.protocol.plan
    tables, charts, numbers = {ROWS: (COLUMNS, _table(inputs))}, _charts(inputs, summed), _summary(inputs, summed)
    mirror = WandbMirror(
        settings,
        root=root,
        # Two experiments of one plan, in folders of their own, are two runs.
        run_id=f"{plan}-comparison-{sha256(str(folder.resolve()).encode()).hexdigest()[:8]}",
        name=plan,
        group=plan,
        job_type="comparison",
        config=_config(inputs),
        resume=True,
    )
    log.info(mirror.notice)
    mirror.show(tables=tables, charts=charts, summary=numbers)
    mirror.close()


def chart_key(evaluation: str, metric: str, axis: str) -> str:
    """What wandb calls the chart of one of an evaluation's `plots`; what stands before the slash is its section."""
    return f"{evaluation}/{metric}_by_{axis}"


def _config(inputs: Inputs) -> dict[str, Any]:
    protocol = asdict(inputs.protocol)
    names = ("plan", "command", "variants", "rank", "reference", "rates", "failures")
    return {name: protocol[name] for name in names}


def _table(inputs: Inputs) -> list[list[Any]]:
    """All rows, as results.csv has them; settings as text, in which wandb's tables can search."""
    lines = []
    for row in inputs.rows:
        content = row.to_dict()
        lines.append([*{**content, "settings": json.dumps(content["settings"], sort_keys=True)}.values()])
    return lines


def _charts(inputs: Inputs, summed: Sequence[Figure]) -> dict[str, LineChart]:
    """One for each pair of an evaluation's `plots` that has numbers."""
    charts = {}
    for evaluation in dict.fromkeys(figure.evaluation for figure in summed):
        own = [figure for figure in summed if figure.evaluation == evaluation]
        plots: dict[str, list[Plot]] = {}
        for plot in plots_of(own, about(evaluation, inputs.protocol).plots):
            plots.setdefault(chart_key(evaluation, plot.metric, plot.axis), []).append(plot)
        charts |= {key: chart for key, group in plots.items() if (chart := _chart(group)).lines}
    return charts


def _chart(plots: Sequence[Plot]) -> LineChart:
    """A line a variant and fixed setting; values of an axis that are no numbers are numbered, and the axis says how."""
    first, positions = plots[0], list(dict.fromkeys(value for plot in plots for value in plot.positions))
    is_numeric = all(plot.is_numeric for plot in plots)
    lines: dict[str, list[tuple[float, float]]] = {}
    for plot in plots:
        fixed = words.place(plot.fixed) if len(plots) > 1 else ""
        for figure in sorted(plot.figures, key=lambda figure: positions.index(figure.settings[first.axis])):
            if figure.mean is not None:
                value = figure.settings[first.axis]
                x = value if is_numeric else positions.index(value)
                lines.setdefault(", ".join(filter(None, (figure.label, fixed))), []).append((x, figure.mean))
    axis = words.axis_name(first.axis)
    if not is_numeric:
        axis += f" ({', '.join(f'{index}: {value}' for index, value in enumerate(positions))})"
    return LineChart(title=words.capitalized(words.metric_name(first.metric, first.unit)), axis=axis, lines=lines)


def _summary(inputs: Inputs, summed: Sequence[Figure]) -> dict[str, float]:
    """The numbers of the report's summary: {"recall/recall at 256, 16/softmax": 1.0}."""
    ranked = families(summed, rank=inputs.protocol.rank, reference=inputs.protocol.reference)
    content = summary(summed, ranked)
    return {
        f"{column.evaluation}/{column.header}/{variant}": entry.figure.mean
        for variant, entries in content.lines.items()
        for column, entry in zip(content.columns, entries, strict=True)
        if entry.figure is not None and entry.figure.mean is not None
    }
