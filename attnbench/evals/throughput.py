"""Speed, memory and arithmetic of the training step, over lengths at one batch size and at one number of tokens."""

from collections.abc import Iterator
from typing import Any, ClassVar

from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import doublings, speed_row, time_row, without_numbers
from attnbench.evals.lib.step_cost import Repetition, StepCost, lacks_text, measure_step, settle
from attnbench.machine.timing import OutOfMemory, matrix_product_ceiling
from attnbench.model.matching import UNCOUNTED
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError

UNITS = {
    "first_step_seconds": "s",
    "step_milliseconds": "ms",
    "tokens_per_second": "token/s",
    "peak_memory_mib": "MiB",
    "achieved_tflops": "TFLOP/s",
    "ceiling_fraction": "",
}


class Throughput(SystemEvaluation):
    """Times the training step itself: forward, backward, clip, optimizer, on real text, as the run trains.

    `first_step_seconds` runs from the built model to the end of its first step, with nothing found in the compiler's
    caches. `achieved_tflops` counts what the mixer's own formula says must be done, and `ceiling_fraction` divides it
    by what one large matrix product reaches on this device in this precision.

    Args:
        lengths: measured at `batch_size` sequences.
        constant_tokens: also measured, at this many tokens a step: the first of `lengths`, twice that, ... up to
            `max_length`; null for none.
        warmup: steps after the first that do not count.
        repeats: steps that count; their median is reported, with the 20th and 80th percentile.
        max_seconds: for the repeats of one setting: where they would take longer there are fewer, at least three.

    Raises:
        UserError: a count that is none, or tokens that a length does not divide.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("tokens_per_second", "sequence_length"),
        ("peak_memory_mib", "sequence_length"),
        ("ceiling_fraction", "sequence_length"),
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("tokens_per_second", "token/s", axes=("sequence_length", "batch_size"), higher_is_better=True),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "lengths": [16],
        "batch_size": 2,
        "constant_tokens": 32,
        "max_length": 32,
        "warmup": 1,
        "repeats": 3,
        "max_seconds": 1.0,
    }
    one_more: ClassVar[dict[str, Any]] = {"lengths": [16, 32]}

    def __init__(
        self,
        *,
        lengths: list,
        batch_size: int,
        constant_tokens: int | None,
        max_length: int,
        warmup: int,
        repeats: int,
        max_seconds: float,
    ) -> None:
        counts = {"lengths": lengths, "batch_size": batch_size, "max_length": max_length}
        check_counts("eval.throughput", **counts, warmup=warmup, repeats=repeats)
        check_value("eval.throughput.max_seconds", max_seconds, above=0)
        at_constant_tokens = []
        if constant_tokens is not None:
            if not lengths:
                raise UserError("eval.throughput.lengths=[]: constant_tokens starts at the first of them")
            at_constant_tokens = doublings(lengths[0], min(max_length, constant_tokens))
            if any(constant_tokens % length for length in at_constant_tokens) or not at_constant_tokens:
                raise UserError(
                    f"eval.throughput.constant_tokens={constant_tokens}: must be a multiple of {lengths[0]} and of "
                    f"its doublings up to max_length={max_length}"
                )
        pairs = [(length, batch_size) for length in lengths]
        pairs += [(length, (constant_tokens or 0) // length) for length in at_constant_tokens]
        # A dict, because it keeps the order and what stands in both lists is measured once.
        self.pairs = list(dict.fromkeys(pairs))
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Setting after setting; one that does not fit is rows that say so."""
        settle(subject)
        ceiling = matrix_product_ceiling(subject.device, subject.precision)
        for length, batch_size in self.pairs:
            settings = {"sequence_length": length, "batch_size": batch_size}
            reason = lacks_text(subject, length, batch_size)
            if reason is not None:
                yield from without_numbers(UNITS, settings, "unsupported", reason)
                continue
            cost = measure_step(subject, length=length, batch_size=batch_size, repetition=self.repetition)
            if isinstance(cost, OutOfMemory):
                yield from without_numbers(UNITS, settings, "out_of_memory", cost.reason)
            else:
                yield from _rows(cost, settings, ceiling)


def _rows(cost: StepCost, settings: dict[str, Any], ceiling: float) -> Iterator[Measurement]:
    """One row for each of UNITS, in their order.

    Args:
        ceiling: TFLOP/s.
    """
    times, num_tokens = cost.times, settings["sequence_length"] * settings["batch_size"]

    def row(metric: str, value: float, **more: Any) -> Measurement:
        return Measurement(metric=metric, value=value, unit=UNITS[metric], settings=settings, **more)

    yield row("first_step_seconds", cost.first_step_seconds, num_samples=1)
    yield time_row(times, settings)
    yield speed_row("tokens_per_second", num_tokens, times, settings)
    yield cost.memory(settings)
    if cost.flops is None:
        counted = {metric: UNITS[metric] for metric in ("achieved_tflops", "ceiling_fraction")}
        yield from without_numbers(counted, settings, "unsupported", UNCOUNTED)
        return
    tflops = cost.flops / times.median_ms / 1e9
    yield row("achieved_tflops", tflops, num_samples=times.num_repeats)
    yield row("ceiling_fraction", tflops / ceiling, num_samples=times.num_repeats)
