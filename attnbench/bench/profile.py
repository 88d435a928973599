"""Profiles: attention, textbook beside fused, by operator, and the training step of each mixer by part."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, ClassVar

from attnbench.bench.base import MAX_ERROR, ROOFLINE, SPEEDUP, Conditions, TimedBench, check_implementations
from attnbench.bench.operators.language_models import model_of
from attnbench.bench.profiling.attention import ATTENTIONS, PEAK, GroupedShape, profile_attention
from attnbench.bench.profiling.step import CAPTURED, EAGER, StepCase, profile_step
from attnbench.bench.tables import Layout, Values
from attnbench.results.rows import Measurement, ResultRow
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError

ATTENTION, STEP = {"subject": "attention"}, {"subject": "training step"}

FORMS = {
    CAPTURED: "as it trains: compiled, replayed as a CUDA graph",
    EAGER: "neither compiled nor captured, modules labelled",
}

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
"""Metrics that stand in summary.csv, and their columns there."""

SUMMARY = (
    *("precision", "subject", "implementation", "sequence_length", "form", "kind", "name"),
    *dict.fromkeys(SUMMED.values()),
    *("operator_part", "counted_by"),
)
"""Columns of summary.csv."""


@dataclass(kw_only=True)
class ProfileBench(TimedBench):
    """Attention textbook and fused, and a training step's parts, under torch's profiler.

    Every training step leaves a trace for Perfetto in traces/, and summary.csv has all tables in one.

    Args:
        implementations: of attention with shared key/value heads and rotary positions: textbook, sdpa_flash,
            sdpa_cudnn, triton; the ratios are to the first. Empty for none.
        batch_size, length, num_heads, num_key_value_heads, head_width, causal: of that attention.
        num_calls: of it under the profiler.
        mixers: yamls of conf/attn whose training steps are profiled; empty for none.
        step_lengths: positions of those steps.
        step_batch_size: sequences of a step.
        model: [width, feed-forward width, layers, heads]; every mixer's parameters are matched to softmax's.
        vocabulary_size: of random characters.
        num_steps: under the profiler.
        num_operators, num_step_operators: lines of the tables of operators, attention's and a step's.

    Raises:
        UserError: a count that is none, heads that cannot be shared, a model that is none.
    """

    implementations: list
    batch_size: int
    length: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    causal: bool
    num_calls: int
    mixers: list
    step_lengths: list[int]
    step_batch_size: int
    model: list
    vocabulary_size: int
    num_steps: int
    num_operators: int
    num_step_operators: int

    layouts: ClassVar[tuple[Layout, ...]] = ()
    plots: ClassVar[tuple[tuple[str, str], ...]] = (("part_share", "part"), ("peak_memory_mib", "sequence_length"))
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline(
            "step_milliseconds",
            "ms a step",
            axes=("sequence_length",),
            label=("sequence_length", "form"),
            settings={"subject": "training step"},
        ),
        Headline(
            "forward_milliseconds",
            "ms of attention",
            axes=("sequence_length",),
            settings={"subject": "attention"},
            pick="each",
        ),
    )
    not_logged: ClassVar[tuple[str, ...]] = (
        *(ROOFLINE, SPEEDUP, "part_share", "part_milliseconds", "unplaced_share"),
        *(values.metric for values in OPERATORS),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Attention, textbook: repeated keys and values, two matrix products, a division and a softmax, against fused "
        "kernels; rotary positions on both sides, forward alone. All calls together are the device's time under the "
        "profiler, which the ratio is of; one call is timed without it, caches cold. The profiler counts no operations "
        "of the fused kernels: theirs are our count, two products over all pairs of positions that see each other.",
        "Training steps, on random characters: a step's time and idle share are those without the profiler, a part's "
        "time that of its kernels under it. Mixing is all that a mixer does besides its projections and norms; other "
        "is embedding, residual additions, copies, and what the compiler fused of none of the parts alone.",
        "In the step that is neither compiled nor captured every module is labelled, and a backward kernel is found by "
        "the sequence number of its forward operator. In the captured step kernels are told apart by what launched "
        "them before the graph was recorded: our operators by name, matrix products by the shape of their weight, the "
        "compiler's kernels by the operators in their names; a residual addition fused with a norm counts as norm.",
        "Once used, the profiler's library stays attached to the process and costs every launch some host time: the "
        "idle share of the step that is not captured is rather too large.",
    )
    smoke: ClassVar[dict[str, Any]] = {
        "implementations": ["textbook", "sdpa_flash", "triton"],
        "length": 32,
        "num_calls": 2,
        "step_lengths": [16],
        "step_batch_size": 2,
        "model": [32, 96, 1, 2],
        "vocabulary_size": 20,
        "num_steps": 1,
        "warmup": 1,
        "repeats": 3,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_implementations(self.implementations, ATTENTIONS, may_be_empty=True)
        if self.num_heads % self.num_key_value_heads or self.head_width % 2:
            wrong = f"bench.num_key_value_heads={self.num_key_value_heads}, bench.head_width={self.head_width}"
            raise UserError(f"{wrong}: must divide bench.num_heads={self.num_heads}, and be even")
        self.size = model_of(self.model, "bench.model")
        self.shape = GroupedShape(
            batch_size=self.batch_size,
            sequence_length=self.length,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_width=self.head_width,
            causal=self.causal,
        )

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
            yield from profile_attention(
                self.shape,
                self.implementations,
                cell,
                conditions,
                num_calls=self.num_calls,
                num_lines=self.num_operators,
                repetition=self.repetition,
            )
            return
        case = StepCase(
            mixer=cell["implementation"],
            length=cell["sequence_length"],
            batch_size=self.step_batch_size,
            model=self.size,
            vocabulary_size=self.vocabulary_size,
            num_steps=self.num_steps,
            num_lines=self.num_step_operators,
            repetition=self.repetition,
        )
        yield from profile_step(case, cell, conditions)

    @classmethod
    def layouts_of(cls, rows: Sequence[ResultRow]) -> list[Layout]:
        """Attention's tables, those of steps, and, for a page alone, a table of operators for each step."""
        subjects = dict.fromkeys(_subject(row) for row in rows if "operator" in row.measurement.settings)
        return [_attention_layout(), *_step_layouts(), *map(_operator_layout, subjects)]

    @classmethod
    def files(cls, rows: Sequence[ResultRow]) -> dict[str, str]:
        """All tables in one."""
        return {"summary.csv": summary_csv(rows)}


def _subject(row: ResultRow) -> tuple[str, str, Any, str | None]:
    settings = row.measurement.settings
    return settings["subject"], row.identity.variant, settings["sequence_length"], settings.get("form")


def _attention_layout() -> Layout:
    return Layout(
        title="Attention with shared key/value heads and rotary positions",
        lines=("implementation", "sequence_length", "num_calls"),
        headers={"num_calls": "calls"},
        columns="subject",
        values=(
            Values(metric="profiled_milliseconds", header="all calls, ms", where=ATTENTION),
            Values(metric=SPEEDUP, header="times faster", where=ATTENTION),
            Values(metric="forward_milliseconds", header="one call, ms", where=ATTENTION),
            Values(metric=ROOFLINE, header="roof", where=ATTENTION, is_share=True),
            Values(metric=PEAK, header="peak MiB", where=ATTENTION),
            Values(metric=MAX_ERROR, header="error", where=ATTENTION),
        ),
    )


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
        passes = Values(metric="pass_milliseconds", where=where)
        yield Layout(title=f"Its passes, ms ({form})", lines=lines, values=(passes,), columns="pass")


def _operator_layout(key: tuple[str, str, Any, str | None]) -> Layout:
    subject, implementation, length, form = key
    where: dict[str, Any] = {"subject": subject, "implementation": implementation, "sequence_length": length}
    where |= {"form": form} if form is not None else {}
    what = "Operators of attention" if form is None else "Operators" if form == EAGER else "Kernels"
    title = f"{what}: {implementation}, {length:,} positions" + (f", a step ({form})" if form is not None else "")
    labels = ("rank", "operator", "operator_part") if form == CAPTURED else ("rank", "operator")
    values = [replace(column, where=where) for column in OPERATORS]
    ours = Values(metric="operator_mflops", header="MFLOPs (our count)", where=where | {"counted_by": "attnbench"})
    values[-1] = Values(metric="operator_mflops", header="MFLOPs", where=where | {"counted_by": "profiler"})
    return Layout(
        title=title,
        lines=labels,
        headers={"operator_part": "part"},
        values=(*values, ours),
        columns="subject",
        on_page_alone=form is not None,
    )


def summary_csv(rows: Sequence[ResultRow]) -> str:
    """A line for each attention, step, pass, part and operator, with what is known of it."""
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
        line |= {name: settings[name] for name in ("operator_part", "counted_by") if name in settings}
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=SUMMARY, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines.values())
    return text.getvalue()
