"""What was measured beside peers as a page: README.md with a table a case, results.csv, environments, figures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from attnbench.report.plots import Plot, plots_of
from attnbench.results.files import replace_file
from attnbench.results.rows import ResultRow, write_csv, write_environments
from attnbench.results.tables import format_number, read_folders
from attnbench.settings.errors import UserError, printable
from attnbench.settings.text import markdown_text, read_object
from attnbench.verdict.seeds import figures
from benchmarks.peers.agreement import PATHS
from benchmarks.peers.cases import CASES
from benchmarks.peers.rows import OURS

PLOTS = (("train_loss", "step"), ("loss_difference", "step"))
NOTES = (
    "Every implementation runs in a process of its own on the same batches, rates and seed: forward, backward, "
    "clipping, AdamW. They take turns, ours first; token/s is the median of the turns with the slowest and the fastest "
    "in brackets, and the ratio that of each turn's neighbours. Ours is the step that trains, captured as a CUDA graph "
    "on a GPU, at the feed-forward width that meets the peer's parameters within 1 %.",
    "A step that is not captured is launched kernel by kernel: where kernels are small it waits for the host, and its "
    "speed is the host's.",
    "Peak memory is everything that the process ever reserved on the device, CUDA-graph pools and what compiling and "
    "warming up took included: it is never reset. The first step starts with all imports done and empty compiler "
    "caches, unless a command below gives a peer a folder of its own for them.",
)


def write_page(outputs: Path, target: Path, *, title: str, with_figures: bool) -> None:
    """Writes the page of all cases under `outputs` into `target`, which may be the same folder.

    Args:
        with_figures: also draws the agreement of losses, which needs the plotting library.

    Raises:
        UserError: nothing was measured there, or on several corpora.
    """
    places = [path.parent for path in sorted(outputs.glob("*/case.json"))]
    order = [*CASES, "first-step", "agreement"]
    places.sort(key=lambda place: order.index(place.name) if place.name in order else len(order))
    rows = read_folders(places)
    if not rows:
        raise UserError(f"{outputs}: no results of benchmark_peers.py")
    target.mkdir(parents=True, exist_ok=True)
    write_csv(rows, target / "results.csv")
    measured = {row.identity.environment for row in rows}
    paths = {path.stem.removeprefix("environment-"): path for one in places for path in one.glob("environment-*.json")}
    write_environments(target, {name: read_object(paths[name]) for name in paths if name in measured})
    drawn = _draw(rows, target) if with_figures else []
    records = [read_object(place / "case.json") for place in places]
    replace_file(target / "README.md", _page(title, rows, records, drawn))


def _page(title: str, rows: Sequence[ResultRow], records: Sequence[dict[str, Any]], drawn: Sequence[Plot]) -> str:
    parts = [f"# {title}"]
    for record in records:
        own = [row for row in rows if row.measurement.settings.get("case") == record["name"]]
        if own:
            parts += [f"## {record['title']}", case_table(own), *_reasons(own)]
    parts += NOTES if len(parts) > 1 else ()
    first_steps = [row for row in rows if row.identity.evaluation == "first_step"]
    if first_steps:
        parts += ["## The first step", _first_step_table(first_steps)]
    agreement = [row for row in rows if row.identity.evaluation == "agreement"]
    if agreement:
        parts += ["## The same losses", _agreement_text(agreement), agreement_table(agreement)]
        parts += [f"![{plot.title}](figures/{plot.name}.svg)" for plot in drawn]
    return "\n\n".join([*parts, _made_by(rows, records)]) + "\n"


def case_table(rows: Sequence[ResultRow]) -> str:
    """One case as Markdown, a line an implementation, ours first."""
    variants = list(dict.fromkeys(row.identity.variant for row in rows))
    variants.sort(key=lambda name: name != OURS)
    headers = ("implementation", "parameters", "token/s", "ours over it", "peak MiB reserved", "first step, s")
    lines = []
    for name in variants:
        own = [row for row in rows if row.identity.variant == name]
        parameters = own[0].identity.parameters
        ratios = [row for row in rows if row.measurement.settings.get("peer") == name]
        lines.append(
            [
                f"{name} ({own[0].identity.backend})" if name == OURS else name,
                "–" if not parameters else f"{parameters:,}",
                _shown(own, "tokens_per_second"),
                _shown(ratios, "tokens_per_second_ratio"),
                _shown(own, "peak_memory_mib"),
                _shown(own, "first_step_seconds"),
            ]
        )
    return _markdown(headers, lines)


def _first_step_table(rows: Sequence[ResultRow]) -> str:
    """Cold and warm, from a configuration with imports done and the step alone."""
    headers = ("mixer", "cold, s", "of which the step", "warm, s", "of which the step")
    lines = []
    for name in dict.fromkeys(row.identity.variant for row in rows):
        cells = []
        for cache in ("cold", "warm"):
            own = [row for row in rows if row.identity.variant == name and row.measurement.settings["cache"] == cache]
            cells += [_shown(own, "start_seconds"), _shown(own, "first_step_seconds")]
        lines.append([name, *cells])
    text = (
        "From a configuration with all imports done, in a new process: the corpus is read, the model built, and the "
        "first optimizer step taken. Cold is with empty compiler caches, warm with those that the cold process left."
    )
    return f"{text}\n\n{_markdown(headers, lines)}"


def _agreement_text(rows: Sequence[ResultRow]) -> str:
    num_steps = rows[0].measurement.settings["num_steps"]
    return (
        f"Training losses over {num_steps} steps from equal weights on equal batches. The reference is the "
        "mixer's torch backend without any kernel of ours, neither compiled nor captured; flash's is softmax. "
        "Nats between the two, on average over every tenth step and where they are furthest apart, and beside it what "
        "precision does by itself: the reference in float32. A loss that jumps for one step jumps by rounding's luck."
    )


def agreement_table(rows: Sequence[ResultRow]) -> str:
    """How far from the reference, a line a mixer."""
    paths = [path for path in PATHS if path != "reference"]
    lines = []
    for name in dict.fromkeys(row.measurement.settings["attn"] for row in rows):
        own = [row for row in rows if row.measurement.settings["attn"] == name]
        found = ([row for row in own if row.identity.variant == path] for path in paths)
        lines.append([name, *(text for cells in found for text in _apart(cells))])
    return _markdown(("mixer", *(text for path in paths for text in (path, "at most"))), lines)


def _apart(rows: Sequence[ResultRow]) -> tuple[str, str]:
    found = [row.measurement.value for row in rows if row.measurement.metric == "loss_difference"]
    differences = [abs(value) for value in found if value is not None]
    return format_number(mean(differences)) if differences else "–", _shown(rows, "largest_loss_difference")


def _draw(rows: Sequence[ResultRow], target: Path) -> list[Plot]:
    """The agreement's figures as SVG; none where it was not measured."""
    # The plotting library is not there on every machine that measures.
    from attnbench.report import charts

    agreement = [row for row in rows if row.identity.evaluation == "agreement" and "step" in row.measurement.settings]
    drawn = plots_of(figures(agreement), PLOTS) if agreement else []
    for plot in drawn:
        (target / "figures").mkdir(exist_ok=True)
        svg = charts.to_svg(charts.specification(plot, list(PATHS)), plot)
        replace_file(target / "figures" / f"{plot.name}.svg", svg)
    return drawn


def _made_by(rows: Sequence[ResultRow], records: Sequence[dict[str, Any]]) -> str:
    def told(name: str) -> str:
        found = dict.fromkeys(getattr(row.identity, name) for row in rows if getattr(row.identity, name))
        return ", ".join(map(str, found))

    commands = "\n".join(f"    {line}" for line in dict.fromkeys(record["command"] for record in records))
    return (
        f"Made by\n\n{commands}\n\nat commit {told('commit')} on {told('device')}, corpus `{told('corpus')}`. "
        "results.csv has all rows, environment-*.json the machine and its libraries."
    )


def _reasons(rows: Sequence[ResultRow]) -> list[str]:
    """Why an implementation has no speed, a paragraph each."""
    return [
        f"{row.identity.variant}: {row.measurement.status.replace('_', ' ')}, {printable(row.measurement.reason)}."
        for row in rows
        if row.measurement.metric == "tokens_per_second" and row.measurement.status != "ok"
    ]


def _shown(rows: Sequence[ResultRow], metric: str) -> str:
    found = [row.measurement for row in rows if row.measurement.metric == metric]
    if not found or found[0].value is None:
        return "–" if not found else found[0].status.replace("_", " ")
    value, low, high = found[0].value, found[0].low, found[0].high
    interval = "" if low is None or high is None else f" [{format_number(low)}, {format_number(high)}]"
    return f"{format_number(value)}{interval}"


def _markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---", *("--:" for _ in headers[1:])]
    cells = [[markdown_text(cell) for cell in line] for line in (headers, marks, *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
