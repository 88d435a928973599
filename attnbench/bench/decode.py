from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from attnbench.bench.base import (
    MAX_ERROR,
    ROOFLINE,
    Bench,
    Conditions,
    speedup_columns,
)
from attnbench.bench.operators.decoding import DECODE, measure_steps
from attnbench.bench.operators.generation import CAPTURED, EAGER, FASTER, RATE, measure_context, measure_text
from attnbench.bench.operators.language_models import candidate_of, model_of
from attnbench.bench.operators.steps import SPLIT, STEPS, WHOLE, CacheShape
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import without_numbers
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

POSITION, TEXT, CONTEXT = "position", "text", "context"
"""Tables; a cell belongs to one."""

LINES = ("head_width", "cache_length", "batch_size")
HEADERS = {"head_width": "width", "cache_length": "cache", "batch_size": "batch"}
FORMS = ("eager", "captured")

OURS = tuple(f"triton{how}" for how in (WHOLE, SPLIT))


class DecodeBench(Bench):
    """Decoding: one new position over a cache, whole texts, and a token behind more and more. [] leaves a table out."""

    head_widths: list[int] = option([16, 32, 64, 80, 96, 128, 192], "channels a head", minimum=1)
    cache_lengths: list[int] = option([2050, 10200], "positions in the cache, all filled", minimum=1)
    batch_sizes: list[int] = option([1, 8], "sequences", minimum=1)
    num_heads: int = option(32, "query heads", minimum=1)
    num_key_value_heads: int | None = option(None, "heads of keys and values; null: as many")
    implementations: list[str] = option(
        [*STEPS],
        "whole: the cache in one piece a head; split: in as many as each library chooses; the last two have a state",
        choices=[*STEPS],
        distinct=True,
        may_be_empty=True,
    )
    mixers: list = option(
        [["flash", "triton"], ["gated_deltanet", "auto"]],
        "of whole models that write, greedily: a yaml of attn/ and a backend",
    )
    model: list = option([256, 880, 4, 4], "width, feed-forward width (softmax's), layers, heads: 4m")
    vocabulary_size: int = option(1015, "symbols; changes the last product alone", minimum=1)
    texts: list = option(
        [[1024, 1], [1024, 2], [1024, 4], [1024, 8], [2048, 1], [2048, 2], [3072, 1]], "tokens, sequences"
    )
    text_repeats: int = option(3, "texts that count; a short one is written before", minimum=1)
    contexts: list[int] = option([1024, 2048, 4096, 8192], "tokens behind which one more is written", minimum=1)
    context_batch_size: int = option(1, "sequences", minimum=1)
    warmup, repeats, max_seconds = 2, 30, 0.1

    ratios = (
        *((f"{name}{WHOLE}", f"{name}{SPLIT}") for name in ("flash_attn", "triton")),
        (f"flash_attn{SPLIT}", f"triton{SPLIT}"),
    )
    layouts = (
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
    notes = (
        "One new position is the mixing alone: attention of one query a head over a full cache, or, whatever the "
        "length, the step of a recurrent state. None of it is in the device's own caches before. The roofline's bytes "
        "are those of keys and values read once. Whole is one split, split as many as the implementation chooses.",
        "A text is written by a whole model with initial weights, greedily: eager runs each step as torch does, "
        "captured replays it as a CUDA graph, recorded before. Where the percentage is below 0 it is slower.",
    )
    plots = ((DECODE, "cache_length"), (RATE, "batch_size"))
    headline = (
        Headline(
            DECODE,
            "ms a position",
            axes=("cache_length", "head_width", "batch_size"),
            label=("cache_length", "head_width"),
            settings={"table": POSITION},
        ),
        Headline(
            RATE,
            "token/s of a text",
            axes=("tokens", "batch_size"),
            settings={"table": TEXT, "form": "captured"},
            higher_is_better=True,
        ),
    )
    smoke = {
        **{"head_widths": [16], "cache_lengths": [33], "batch_sizes": [2], "num_heads": 4, "num_key_value_heads": 2},
        **{"mixers": [["flash", "auto"], ["gated_deltanet", "auto"]], "model": [32, 64, 2, 2], "vocabulary_size": 32},
        **{"texts": [[12, 2]], "text_repeats": 1, "contexts": [8, 16], "warmup": 1, "repeats": 3},
    }

    def __post_init__(self) -> None:
        for name, kind, what in (
            ("texts", int, "[tokens, sequences]"),
            ("mixers", str, "[name of a yaml of attn/, backend]"),
        ):
            pairs = getattr(self, name)
            if not all(isinstance(pair, list) and [*map(type, pair)] == [kind, kind] for pair in pairs):
                raise UserError(f"bench.{name}={pairs}: must be a list of {what}")
        for pair in self.texts:
            check_value("bench.texts", pair, minimum=1)
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
            yield from measure_steps(shape, self.implementations, self, settings, conditions)
            return
        is_text = cell["table"] == TEXT
        for name, backend in self.mixers:
            size = {"size": self.size, "vocabulary_size": self.vocabulary_size, "length": 1}
            try:
                candidate = candidate_of(name, conditions, **size, use="compute", backend=backend)
                # Matched here: an impossible size is a refusal too.
                _ = candidate.matched
            except UserError as refusal:
                units = {EAGER: "s", CAPTURED: "s"} if is_text else {DECODE: "ms"}
                settings = cell | {"implementation": f"{name} ({backend})"}
                yield from without_numbers(units, settings, "unsupported", str(refusal))
                continue
            if is_text:
                yield from measure_text(candidate, cell["tokens"], cell["batch_size"], self.text_repeats, cell)
            else:
                yield from measure_context(candidate, cell["cache_length"], cell["batch_size"], self, cell)
