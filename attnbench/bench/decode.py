"""Decoding: one new position by everybody, texts by a plain loop and a captured step, a token behind more and more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from attnbench.bench.base import (
    MAX_ERROR,
    ROOFLINE,
    Conditions,
    TimedBench,
    check_implementations,
    speedup_columns,
    with_speedups,
)
from attnbench.bench.operators.decoding import DECODE, measure_steps
from attnbench.bench.operators.generation import (
    CAPTURED,
    EAGER,
    FASTER,
    RATE,
    measure_context,
    measure_text,
)
from attnbench.bench.operators.language_models import Candidate, candidate_of, model_of
from attnbench.bench.operators.steps import SPLIT, STEPS, WHOLE, CacheShape
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import without_numbers
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts
from attnbench.settings.errors import UserError

POSITION, TEXT, CONTEXT = "position", "text", "context"
"""Tables; a cell belongs to one."""

LINES = ("head_width", "cache_length", "batch_size")
HEADERS = {"head_width": "width", "cache_length": "cache", "batch_size": "batch"}
FORMS = ("eager", "captured")

OURS = tuple(f"triton{how}" for how in (WHOLE, SPLIT))


@dataclass(kw_only=True)
class DecodeBench(TimedBench):
    """Times one new position over a cache, whole texts, and a token behind more and more. [] leaves a table out.

    Args:
        head_widths: channels a head.
        cache_lengths: positions in the cache, all filled.
        batch_sizes: sequences.
        num_heads: query heads.
        num_key_value_heads: each is shared by num_heads / num_key_value_heads query heads; null for num_heads.
        implementations: names, see bench/operators/steps.py.
        mixers: [name of a yaml of attn/, backend] each.
        model: [width, feed-forward width, layers, heads] of the model that writes; the feed-forward width is softmax's,
            and the mixers get those that meet its parameters.
        vocabulary_size: symbols.
        texts: [tokens, sequences] each.
        text_repeats: texts that count; before them a short one is written.
        contexts: tokens behind which one more is written.
        context_batch_size: sequences.

    Raises:
        UserError: a count that is none, an implementation that there is not, or heads that do not fit together.
    """

    head_widths: list[int]
    cache_lengths: list[int]
    batch_sizes: list[int]
    num_heads: int
    num_key_value_heads: int | None
    implementations: list
    mixers: list
    model: list
    vocabulary_size: int
    texts: list
    text_repeats: int
    contexts: list[int]
    context_batch_size: int

    ratios: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"{name}{WHOLE}", f"{name}{SPLIT}") for name in ("flash_attn", "triton")),
        (f"flash_attn{SPLIT}", f"triton{SPLIT}"),
    )
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            title="one new position, ms",
            lines=LINES,
            values=(
                Values(metric=DECODE, where={"table": POSITION}),
                Values(metric=ROOFLINE, header="{}, roof", only=OURS, is_share=True),
                *speedup_columns(ratios, "decode"),
            ),
            headers=HEADERS,
        ),
        Layout(
            title="one new position, largest relative error",
            lines=LINES,
            values=(Values(metric=MAX_ERROR, where={"table": POSITION}),),
            headers=HEADERS,
        ),
        Layout(
            title="a text, s",
            lines=("implementation", "tokens", "batch_size"),
            columns="table",
            values=(
                Values(metric=EAGER, header="eager"),
                Values(metric=CAPTURED, header="captured"),
                Values(metric=FASTER, header="captured is faster by, %"),
                *(Values(metric=RATE, header=f"{form}, token/s", where={"form": form}) for form in FORMS),
                *(
                    Values(metric=MAX_ERROR, header=f"{form}, error", where={"table": TEXT, "form": form})
                    for form in FORMS
                ),
            ),
            headers={"implementation": "mixer", "batch_size": "batch"},
        ),
        Layout(
            title="one token behind so many, ms",
            lines=("cache_length",),
            headers=HEADERS,
            values=(
                Values(metric=DECODE, where={"table": CONTEXT}),
                Values(metric=MAX_ERROR, header="{}, error", where={"table": CONTEXT}),
            ),
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "One new position is the mixing alone: attention of one query a head over a full cache, or, whatever the "
        "length, the step of a recurrent state. None of it is in the device's own caches before. The roofline's bytes "
        "are those of keys and values read once. Whole is one split, split as many as the implementation chooses.",
        "A text is written by a whole model with initial weights, greedily: eager runs each step as torch does, "
        "captured replays it as a CUDA graph, recorded before. Where the percentage is below 0 it is slower.",
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = ((DECODE, "cache_length"), (RATE, "batch_size"))
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline(
            "decode_milliseconds",
            "ms a position",
            axes=("cache_length", "head_width", "batch_size"),
            label=("cache_length", "head_width"),
            settings={"table": "position"},
        ),
        Headline(
            "tokens_per_second",
            "token/s of a text",
            axes=("tokens", "batch_size"),
            settings={"table": "text", "form": "captured"},
            higher_is_better=True,
        ),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "head_widths": [16],
        "cache_lengths": [33],
        "batch_sizes": [2],
        "num_heads": 4,
        "num_key_value_heads": 2,
        "warmup": 1,
        "repeats": 3,
        "mixers": [["flash", "auto"], ["gated_deltanet", "auto"]],
        "model": [32, 64, 2, 2],
        "vocabulary_size": 32,
        "texts": [[12, 2]],
        "text_repeats": 1,
        "contexts": [8, 16],
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, pairs, kind in (("texts", self.texts, int), ("mixers", self.mixers, str)):
            if not all(isinstance(pair, list) and len(pair) == 2 and set(map(type, pair)) == {kind} for pair in pairs):
                what = "[tokens, sequences]" if kind is int else "[name of a yaml of attn/, backend]"
                raise UserError(f"bench.{name}={pairs}: must be a list of {what}")
        for pair in self.texts:
            check_counts("bench", texts=pair)
        check_implementations(self.implementations, STEPS, may_be_empty=True)
        self.groups = self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads
        if self.groups < 1 or self.num_heads % self.groups:
            wrong = f"bench.num_key_value_heads={self.num_key_value_heads}"
            raise UserError(f"{wrong}: must divide bench.num_heads={self.num_heads}")
        self.size = model_of(self.model, "bench.model")

    @property
    def mixer_names(self) -> Sequence[str]:
        return list(dict.fromkeys(name for name, _ in self.mixers))

    def cells(self) -> Iterator[dict[str, Any]]:
        axes = (self.head_widths, self.cache_lengths, self.batch_sizes)
        for values in product(*axes) if self.implementations else ():
            yield {"table": POSITION} | dict(zip(LINES, values, strict=True))
        for tokens, batch_size in self.texts if self.mixers else []:
            yield {"table": TEXT, "tokens": tokens, "batch_size": batch_size}
        for context in self.contexts if self.mixers else []:
            yield {"table": CONTEXT, "cache_length": context, "batch_size": self.context_batch_size}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        if cell["table"] == POSITION:
            settings = cell | {"num_heads": self.num_heads, "num_key_value_heads": self.groups}
            shape = CacheShape(**{name: value for name, value in settings.items() if name != "table"})
            rows = measure_steps(shape, self.implementations, self.repetition, settings, conditions)
            yield from with_speedups(rows, self.ratios)
        elif cell["table"] == TEXT:
            yield from self._of_mixers(
                {EAGER: "s", CAPTURED: "s"},
                cell,
                conditions,
                lambda one: measure_text(one, cell["tokens"], cell["batch_size"], self.text_repeats, cell),
            )
        else:
            yield from self._of_mixers(
                {DECODE: "ms"},
                cell,
                conditions,
                lambda one: measure_context(one, cell["cache_length"], cell["batch_size"], self.repetition, cell),
            )

    def _of_mixers(
        self,
        units: dict[str, str],
        cell: dict[str, Any],
        conditions: Conditions,
        measure: Callable[[Candidate], Iterator[Measurement]],
    ) -> Iterator[Measurement]:
        for name, backend in self.mixers:
            try:
                candidate = candidate_of(
                    name,
                    conditions,
                    size=self.size,
                    vocabulary_size=self.vocabulary_size,
                    length=1,
                    use="compute",
                    backend=backend,
                )
                # Matched here: a size that cannot be met is a refusal too.
                _ = candidate.matched
            except UserError as refusal:
                settings = cell | {"implementation": f"{name} ({backend})"}
                yield from without_numbers(units, settings, "unsupported", str(refusal))
                continue
            yield from measure(candidate)
