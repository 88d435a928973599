import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from attnbench.bench.base import MAX_ERROR, ROOFLINE, SPEEDUP, Bench, Conditions
from attnbench.bench.operators.language_models import model_of
from attnbench.bench.profiling.attention import ATTENTIONS, PEAK, GroupedShape, profile_attention
from attnbench.bench.profiling.step import CAPTURED, EAGER, StepCase, profile_step
from attnbench.bench.tables import Layout, Values
from attnbench.results.rows import Measurement, ResultRow
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

ATTENTION, STEP = {"subject": "attention"}, {"subject": "training step"}

FORMS = {
    CAPTURED: "as it trains: compiled, replayed as a CUDA graph",
    EAGER: "neither compiled nor captured, modules labelled",
}

ATTENTION_LAYOUT = Layout(
    title="Attention with shared key/value heads and rotary positions",
    lines=("implementation", "sequence_length", "num_calls"),
    headers={"num_calls": "calls"},
    columns="subject",
    values=tuple(
        Values(metric=metric, header=header, where=ATTENTION, is_share=metric == ROOFLINE)
        for metric, header in (
            *(("profiled_milliseconds", "all calls, ms"), (SPEEDUP, "times faster")),
            *(("forward_milliseconds", "one call, ms"), (ROOFLINE, "roof")),
            *((PEAK, "peak MiB"), (MAX_ERROR, "error")),
        )
    ),
)

OPERATORS = (
    Values(metric="operator_calls", header="calls"),
    Values(metric="operator_milliseconds", header="ms"),
    Values(metric="operator_share", header="share", is_share=True),
    Values(metric="operator_mib", header="MiB"),
    Values(metric="operator_mflops", header="MFLOPs"),
)

SUMMED = {
    "forward_milliseconds": "milliseconds",
    "step_milliseconds": "milliseconds",
    "profiled_milliseconds": "profiled_milliseconds",
    SPEEDUP: "times_faster",
    "part_milliseconds": "profiled_milliseconds",
    "pass_milliseconds": "profiled_milliseconds",
    "operator_milliseconds": "profiled_milliseconds",
    "part_share": "share",
    "operator_share": "share",
    "operator_calls": "calls",
    "operator_mib": "mib",
    PEAK: "mib",
    "peak_memory_mib": "mib",
    "operator_mflops": "mflops",
}
"""Metrics of summary.csv, and their columns there."""

SUMMARY = (
    *("precision", "subject", "implementation", "sequence_length", "form", "kind", "name"),
    *dict.fromkeys(SUMMED.values()),
    "counted_by",
)


class ProfileBench(Bench):
    """Profiles: attention, textbook and fused, by operator, and the training step of each mixer by part.

    Every training step leaves a trace for Perfetto in traces/, and summary.csv has all tables in one.
    """

    implementations: list[str] = option(
        ["textbook", "triton"],
        "of attention with shared key/value heads and rotary positions: textbook | sdpa_flash | sdpa_cudnn | triton; "
        "the ratios are to the first; []: none",
        choices=[*ATTENTIONS],
        distinct=True,
        may_be_empty=True,
    )
    batch_size: int = option(1, "of that attention", minimum=1)
    length: int = option(4096, "positions", minimum=1)
    num_heads: int = option(16, "query heads", minimum=1)
    num_key_value_heads: int = option(4, "heads of keys and values", minimum=1)
    head_width: int = option(32, "channels a head", minimum=1)
    causal: bool = option(False, "false: every position sees all")
    num_calls: int = option(100, "under the profiler", minimum=1)
    mixers: list = option(
        ["softmax", "flash", "linear", "gated_deltanet"], "yamls of attn/ whose training steps are profiled; []: none"
    )
    step_lengths: list[int] = option([256, 512, 1024], "positions of those steps", minimum=1)
    step_batch_size: int = option(128, "sequences of a step", minimum=1)
    model: list = option([256, 880, 4, 4], "width, feed-forward width, layers, heads: 4m; each mixer's is matched")
    vocabulary_size: int = option(284, "of random characters; WikiText-2 has so many", minimum=1)
    num_steps: int = option(3, "under the profiler", minimum=1)
    num_operators: int = option(10, "lines of a table of attention's operators", minimum=1)
    num_step_operators: int = option(15, "and of a step's", minimum=1)
    warmup, max_seconds = 3, 2

    layouts = ()
    # 1: the captured step has no parts.
    numbers_version = 1
    plots = (("part_share", "part"), ("peak_memory_mib", "sequence_length"))
    headline = (
        Headline(
            "step_milliseconds",
            "ms a step",
            axes=("sequence_length",),
            label=("sequence_length", "form"),
            settings=STEP,
        ),
        Headline("forward_milliseconds", "ms of attention", axes=("sequence_length",), settings=ATTENTION, pick="each"),
    )
    not_logged = (
        *(ROOFLINE, SPEEDUP, "part_share", "part_milliseconds", "unplaced_share"),
        *(values.metric for values in OPERATORS),
    )
    notes = (
        "Attention, textbook: repeated keys and values, two matrix products, a division and a softmax, against fused "
        "kernels; rotary positions on both sides, forward alone. All calls together are the device's time under the "
        "profiler, which the ratio is of; one call is timed without it, caches cold. The profiler counts no operations "
        "of the fused kernels: theirs are our count, two products over all pairs of positions that see each other.",
        "Training steps, on random characters: a step's time and idle share are those without the profiler, a part's "
        "time that of its kernels under it. Mixing is all that a mixer does besides its projections and norms; other "
        "is embedding, residual additions, copies, and work of unknown part.",
        "In the step that is neither compiled nor captured every module is labelled, and backward work is found by the "
        "sequence number of its forward operator. Of the captured step the profiler sees the kernels alone.",
        "Once used, the profiler's library stays attached to the process and costs every launch some host time: the "
        "idle share of the step that is not captured is rather too large.",
    )
    smoke = {
        **{"implementations": ["textbook", "sdpa_flash", "triton"], "length": 32, "num_calls": 2},
        **{"step_lengths": [16], "step_batch_size": 2, "model": [32, 96, 1, 2], "vocabulary_size": 20},
        **{"num_steps": 1, "warmup": 1, "repeats": 3},
    }

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_value_heads or self.head_width % 2:
            wrong = f"bench.num_key_value_heads={self.num_key_value_heads}, bench.head_width={self.head_width}"
            raise UserError(f"{wrong}: must divide bench.num_heads={self.num_heads}, and be even")
        self.size = model_of(self.model, "bench.model")
        names = ("batch_size", "num_heads", "num_key_value_heads", "head_width", "causal")
        self.shape = GroupedShape(sequence_length=self.length, **{name: getattr(self, name) for name in names})

    @property
    def mixer_names(self) -> Sequence[str]:
        return list(dict.fromkeys(self.mixers))

    def cells(self) -> Iterator[dict[str, Any]]:
        if self.implementations:
            yield ATTENTION | asdict(self.shape) | {"num_calls": self.num_calls}
        for mixer, length in product(self.mixer_names, dict.fromkeys(self.step_lengths)):
            yield STEP | {"implementation": mixer, "sequence_length": length, "batch_size": self.step_batch_size}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        if cell["subject"] == ATTENTION["subject"]:
            how = {"num_calls": self.num_calls, "num_lines": self.num_operators, "repetition": self}
            yield from profile_attention(self.shape, self.implementations, cell, conditions, **how)
            return
        size = {"batch_size": self.step_batch_size, "model": self.size, "vocabulary_size": self.vocabulary_size}
        how = {"num_steps": self.num_steps, "num_lines": self.num_step_operators, "repetition": self}
        case = StepCase(mixer=cell["implementation"], length=cell["sequence_length"], **size, **how)
        yield from profile_step(case, cell, conditions)

    @classmethod
    def layouts_of(cls, rows: Sequence[ResultRow]) -> list[Layout]:
        subjects = dict.fromkeys(_subject(row) for row in rows if "operator" in row.measurement.settings)
        return [ATTENTION_LAYOUT, *_step_layouts(), *map(_operator_layout, subjects)]

    @classmethod
    def files(cls, rows: Sequence[ResultRow]) -> dict[str, str]:
        return {"summary.csv": summary_csv(rows)}


def _subject(row: ResultRow) -> tuple[str, str, Any, str | None]:
    settings = row.measurement.settings
    return settings["subject"], row.identity.variant, settings["sequence_length"], settings.get("form")


def _step_layouts() -> Iterator[Layout]:
    lines = ("implementation", "backend", "sequence_length")
    for form, words in FORMS.items():
        where = STEP | {"form": form}
        costs = (
            Values(metric="step_milliseconds", header="ms", where=where),
            Values(metric=ROOFLINE, header="roof", where=where, is_share=True),
            Values(metric="peak_memory_mib", header="peak MiB", where=where),
            Values(metric=MAX_ERROR, header="error of a layer", where=where),
        )
        yield Layout(title=f"A training step {words}", lines=lines, values=costs, columns="form")
        share = Values(metric="part_share", where=where, is_share=True)
        yield Layout(title=f"Its parts ({form})", lines=lines, values=(share,), columns="part")
    passes = Values(metric="pass_milliseconds", where=STEP | {"form": EAGER})
    yield Layout(title=f"Its passes, ms ({EAGER})", lines=lines, values=(passes,), columns="pass")


def _operator_layout(key: tuple[str, str, Any, str | None]) -> Layout:
    subject, implementation, length, form = key
    where: dict[str, Any] = {"subject": subject, "implementation": implementation, "sequence_length": length}
    where |= {"form": form} if form is not None else {}
    what = "Operators of attention" if form is None else "Operators" if form == EAGER else "Kernels"
    title = f"{what}: {implementation}, {length:,} positions" + (f", a step ({form})" if form is not None else "")
    values = [replace(column, where=where) for column in OPERATORS]
    ours = Values(metric="operator_mflops", header="MFLOPs (our count)", where=where | {"counted_by": "attnbench"})
    values[-1] = Values(metric="operator_mflops", header="MFLOPs", where=where | {"counted_by": "profiler"})
    lines, is_long = ("rank", "operator"), form is not None
    return Layout(title=title, lines=lines, values=(*values, ours), columns="subject", on_page_alone=is_long)


def summary_csv(rows: Sequence[ResultRow]) -> str:
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        measurement, settings = row.measurement, row.measurement.settings
        if measurement.metric not in SUMMED or measurement.value is None:
            continue
        subject, implementation, length, form = _subject(row)
        kind = next((name for name in ("operator", "part", "pass") if name in settings), "whole")
        key = (row.identity.precision, subject, implementation, length, form, kind, settings.get(kind, ""))
        line = lines.setdefault((*key, settings.get("rank")), dict(zip(SUMMARY, key, strict=False)))
        line[SUMMED[measurement.metric]] = measurement.value
        if "counted_by" in settings:
            line["counted_by"] = settings["counted_by"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=SUMMARY, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines.values())
    return text.getvalue()
