from collections.abc import Iterator
from typing import Any

from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import doublings, peak_row, speed_row, time_row, without_numbers
from attnbench.evals.lib.step_cost import StepCost, Timed, lacks_text, measure_step, settle
from attnbench.machine.timing import OutOfMemory, matrix_product_ceiling
from attnbench.model.matching import UNCOUNTED
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

UNITS = {
    "first_step_seconds": "s",
    "step_milliseconds": "ms",
    "tokens_per_second": "token/s",
    "peak_memory_mib": "MiB",
    "achieved_tflops": "TFLOP/s",
    "ceiling_fraction": "",
}


class Throughput(Timed, SystemEvaluation):
    """The training step itself, over sequence lengths: forward, backward, clip, optimizer, on real text.

    `first_step_seconds` starts from the built model, with empty compiler caches. `achieved_tflops` counts the
    operations by the mixer's own formula, and `ceiling_fraction` divides it by the speed of one large matrix product.
    Times are medians, with the 20th and 80th percentile.
    """

    lengths: list[int] = option([256, 512, 1024], "characters in a sequence, at batch_size sequences a step", minimum=1)
    batch_size: int = option(128, "sequences a step", minimum=1)
    constant_tokens: int | None = option(
        32768, "characters a step while the length doubles from the first of lengths; null: none"
    )
    max_length: int = option(32768, "where the doubling ends", minimum=1)

    plots = (
        ("tokens_per_second", "sequence_length"),
        ("peak_memory_mib", "sequence_length"),
        ("ceiling_fraction", "sequence_length"),
    )
    headline = (
        Headline("tokens_per_second", "token/s", axes=("sequence_length", "batch_size"), higher_is_better=True),
    )
    smoke = {
        **{"lengths": [16], "batch_size": 2, "constant_tokens": 32, "max_length": 32},
        **{"warmup": 1, "repeats": 3, "max_seconds": 1.0},
    }
    one_more = {"lengths": [16, 32]}

    def __post_init__(self) -> None:
        tokens, at_constant_tokens = self.constant_tokens, []
        if tokens is not None:
            if not self.lengths:
                raise UserError("eval.throughput.lengths=[]: constant_tokens starts at the first of them")
            at_constant_tokens = doublings(self.lengths[0], min(self.max_length, tokens))
            if any(tokens % length for length in at_constant_tokens) or not at_constant_tokens:
                raise UserError(
                    f"eval.throughput.constant_tokens={tokens}: must be a multiple of {self.lengths[0]} and of "
                    f"its doublings up to max_length={self.max_length}"
                )
        pairs = [(length, self.batch_size) for length in self.lengths]
        pairs += [(length, (tokens or 0) // length) for length in at_constant_tokens]
        # A dict keeps the order and drops pairs of both lists.
        self.pairs = list(dict.fromkeys(pairs))

    def run(self, subject: Subject) -> Iterator[Measurement]:
        settle(subject)
        ceiling = matrix_product_ceiling(subject.device, subject.precision)
        for length, batch_size in self.pairs:
            settings = {"sequence_length": length, "batch_size": batch_size}
            reason = lacks_text(subject, length, batch_size)
            if reason is not None:
                yield from without_numbers(UNITS, settings, "unsupported", reason)
                continue
            cost = measure_step(subject, length=length, batch_size=batch_size, repetition=self)
            if isinstance(cost, OutOfMemory):
                yield from without_numbers(UNITS, settings, "out_of_memory", cost.reason)
            else:
                yield from _rows(cost, settings, ceiling)


def _rows(cost: StepCost, settings: dict[str, Any], ceiling_tflops: float) -> Iterator[Measurement]:
    times, num_tokens = cost.times, settings["sequence_length"] * settings["batch_size"]

    def row(metric: str, value: float, **more: Any) -> Measurement:
        return Measurement(metric=metric, value=value, unit=UNITS[metric], settings=settings, **more)

    yield row("first_step_seconds", cost.first_step_seconds, num_samples=1)
    yield time_row(times, settings)
    yield speed_row("tokens_per_second", num_tokens, times, settings)
    yield peak_row("peak_memory_mib", cost.peak_mib, settings)
    if cost.flops is None:
        counted = {metric: UNITS[metric] for metric in ("achieved_tflops", "ceiling_fraction")}
        yield from without_numbers(counted, settings, "unsupported", UNCOUNTED)
        return
    tflops = cost.flops / times.median_ms / 1e9
    yield row("achieved_tflops", tflops, num_samples=times.num_repeats)
    yield row("ceiling_fraction", tflops / ceiling_tflops, num_samples=times.num_repeats)
