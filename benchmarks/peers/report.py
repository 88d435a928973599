"""The page of what was measured beside peers: a table a case, first steps, agreement, results.csv, environments."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from attnbench.report.charts.plots import plots_of
from attnbench.results import page
from attnbench.results.numbers import format_interval, format_number
from attnbench.results.rows import ResultRow
from attnbench.results.tables import NOTHING, Table, read_folders
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import read_object
from attnbench.verdict.seeds import figures
from benchmarks.peers.cases import CASES, OURS
from benchmarks.peers.trainings import PATHS

ORDER = (*CASES, "first-step", "agreement")
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
FIRST_STEPS = (
    "From a configuration with all imports done, in a new process: the corpus is read, the model built, and the "
    "first optimizer step taken. Cold is with empty compiler caches, warm with those that the cold process left."
)


def write_page(outputs: Path, target: Path, *, title: str, with_figures: bool) -> None:
    """Write the page of all cases under `outputs` into `target`, which may be the same folder.

    Args:
        with_figures: also draw the agreement of losses, which needs the plotting library.

    Raises:
        UserError: nothing was measured there, or on several corpora.
    """
    folders = [path.parent for path in sorted(outputs.glob("*/case.json"))]
    folders.sort(key=lambda folder: ORDER.index(folder.name) if folder.name in ORDER else len(ORDER))
    rows = read_folders(folders)
    if not rows:
        raise UserError(f"{outputs}: no results of benchmark_peers.py")
    records = [read_object(folder / "case.json") for folder in folders]
    stamps = {path.stem.removeprefix("environment-"): path for one in folders for path in one.glob("environment-*")}
    images = _images(rows) if with_figures else {}
    if images:
        (target / "figures").mkdir(parents=True, exist_ok=True)
    commit, device, corpus = (page.listed_values(rows, column) for column in ("commit", "device", "corpus"))
    sentences = (
        f"at commit {commit} on {device}, corpus `{corpus}`. results.csv has all rows, environment-*.json the machine "
        "and its libraries."
    )
    cases = [table for record in records for table in case_tables(rows, record["name"], record.get("title", ""))]
    page.write_page(
        target,
        title=title,
        parts=[
            *cases,
            *(NOTES if cases else ()),
            *_first_steps(_of(rows, "first_step")),
            *_agreement(_of(rows, "agreement")),
            *(f"![{caption}]({name})" for name, (caption, _) in images.items()),
            page.made_by(dict.fromkeys(record["command"] for record in records), sentences),
        ],
        rows=rows,
        environments={name: read_object(stamps[name]) for name in {row.identity.environment for row in rows}},
        files={name: svg for name, (_, svg) in images.items()},
    )


def case_tables(rows: Sequence[ResultRow], name: str, title: str) -> list[Table]:
    """One case, a line an implementation, ours first; empty where nothing of it was measured."""
    rows = [row for row in rows if row.measurement.settings.get("case") == name]
    lines = []
    for variant in sorted({row.identity.variant: None for row in rows}, key=lambda variant: variant != OURS):
        measured = [row for row in rows if row.identity.variant == variant]
        identity = measured[0].identity
        ratios = [row for row in rows if row.measurement.settings.get("peer") == variant]
        lines.append(
            [
                f"{variant} ({identity.backend})" if variant == OURS else variant,
                f"{identity.parameters:,}" if identity.parameters else NOTHING,
                _number(measured, "tokens_per_second"),
                _number(ratios, "tokens_per_second_ratio"),
                _number(measured, "peak_memory_mib"),
                _number(measured, "first_step_seconds"),
            ]
        )
    reasons = [
        f"{row.identity.variant}: {row.measurement.status.replace('_', ' ')}, {row.measurement.reason}."
        for row in rows
        if row.measurement.metric == "tokens_per_second" and row.measurement.status != "ok"
    ]
    headers = ("implementation", "parameters", "token/s", "ours over it", "peak MiB reserved", "first step, s")
    return [Table(title=title, headers=headers, lines=lines, notes=reasons)] if lines else []


def _first_steps(rows: Sequence[ResultRow]) -> list[str | Table]:
    """Cold and warm, from a configuration with imports done and the step alone."""
    if not rows:
        return []
    headers = ("mixer", "cold, s", "of which the step", "warm, s", "of which the step")
    lines = []
    for name in dict.fromkeys(row.identity.variant for row in rows):
        line = [name]
        for cache in ("cold", "warm"):
            of = [row for row in rows if (row.identity.variant, row.measurement.settings["cache"]) == (name, cache)]
            line += [_number(of, "start_seconds"), _number(of, "first_step_seconds")]
        lines.append(line)
    return ["## The first step", FIRST_STEPS, Table(headers=headers, lines=lines)]


def _agreement(rows: Sequence[ResultRow]) -> list[str | Table]:
    """Distance from the reference, a line a mixer."""
    if not rows:
        return []
    paths = [path for path in PATHS if path != "reference"]
    lines = []
    for name in dict.fromkeys(row.measurement.settings["attn"] for row in rows):
        line = [name]
        for path in paths:
            of = [row for row in rows if (row.measurement.settings["attn"], row.identity.variant) == (name, path)]
            apart = [row.measurement.value for row in of if row.measurement.metric == "loss_difference"]
            values = [abs(value) for value in apart if value is not None]
            line += [format_number(mean(values)) if values else NOTHING, _number(of, "largest_loss_difference")]
        lines.append(line)
    text = (
        f"Training losses over {rows[0].measurement.settings['num_steps']} steps from equal weights on equal batches. "
        "The reference is the mixer's torch backend without any kernel of ours, neither compiled nor captured; flash's "
        "is softmax. Nats between the two, on average over every tenth step and where they are furthest apart, and "
        "beside it what precision does by itself: the reference in float32. A loss that jumps for one step jumps by "
        "rounding's luck."
    )
    headers = ("mixer", *(header for path in paths for header in (path, "at most")))
    return ["## The same losses", text, Table(headers=headers, lines=lines)]


def _images(rows: Sequence[ResultRow]) -> dict[str, tuple[str, str]]:
    """The agreement's figures, caption and SVG by file name; none where it was not measured."""
    # The plotting library is not there on every machine that measures.
    from attnbench.report.charts.pictures import picture
    from attnbench.report.charts.style import to_svg

    steps, paths = [row for row in _of(rows, "agreement") if "step" in row.measurement.settings], list(PATHS)
    plots = plots_of(figures(steps), PLOTS) if steps else []
    return {f"figures/{plot.name}.svg": (plot.title, to_svg(picture(plot, paths), paths)) for plot in plots}


def _of(rows: Iterable[ResultRow], evaluation: str) -> list[ResultRow]:
    return [row for row in rows if row.identity.evaluation == evaluation]


def _number(rows: Sequence[ResultRow], metric: str) -> str:
    """The number of one row, with the interval where it has one."""
    measured = [row.measurement for row in rows if row.measurement.metric == metric]
    if not measured or measured[0].value is None:
        return measured[0].status.replace("_", " ") if measured else NOTHING
    interval = format_interval(measured[0].low, measured[0].high)
    return " ".join(filter(None, (format_number(measured[0].value), interval)))
