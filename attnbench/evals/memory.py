"""Peak memory of a forward and of a training pass over lengths, and of the state while decoding."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.passes import METRICS, Weigh, resident_weigher, weigh_on_device
from attnbench.evals.lib.rows import doublings, peak_row, state_rows, without_number
from attnbench.machine.timing import UNKNOWN_PEAK, CappedChild, OutOfMemory
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.options import option


class Memory(SystemEvaluation):
    """Peak memory above the weights, over sequence lengths that double until one no longer fits; on random tokens.

    Not compiled: compiling every length would take longer than the rest. On CUDA the peak is the memory allocated by
    torch (throughput reports reserved blocks, which hide growth at short lengths); on a CPU the resident set of a child
    process with a memory limit.

    `growth_exponent` is the slope of log(peak) over log(length) through the upper half of the lengths that fit, at
    least three, with one standard error: 1 for linear growth, 2 for quadratic.
    """

    min_length: int = option(256, "characters in a sequence; doubles until it no longer fits", minimum=1)
    max_length: int = option(131072, "the last length on a GPU", minimum=1)
    cpu_max_length: int = option(2048, "the last length on a CPU", minimum=1)
    batch_size: int = option(8, "sequences at a time", minimum=1)
    cpu_cap_mib: int = option(4096, "memory that a pass may take on a CPU; on a GPU its memory is the limit", minimum=1)

    plots = (
        ("forward_peak_mib", "sequence_length"),
        ("training_peak_mib", "sequence_length"),
        ("state_bytes", "sequence_length"),
    )
    headline = (Headline("training_peak_mib", "training MiB", axes=("sequence_length", "batch_size")),)
    smoke = {"min_length": 32, "max_length": 128, "cpu_max_length": 128, "batch_size": 2, "cpu_cap_mib": 512}
    one_more = {"min_length": 16}

    def __post_init__(self) -> None:
        for name in ("max_length", "cpu_max_length"):
            length = getattr(self, name)
            if length < self.min_length:
                raise UserError(f"eval.memory.{name}={length}: must be at least min_length={self.min_length}")

    def run(self, subject: Subject) -> Iterator[Measurement]:
        is_cpu = subject.device.type == "cpu"
        lengths = doublings(self.min_length, self.cpu_max_length if is_cpu else self.max_length)
        yield from state_rows(subject, lengths, "sequence_length")
        if not is_cpu:
            weigh = partial(weigh_on_device, subject.builder(), self.batch_size, subject.precision, subject.device)
            yield from self._modes(weigh, lengths)
            return
        prepare = partial(resident_weigher, subject.builder(), self.batch_size, subject.precision)
        with CappedChild(prepare, self.cpu_cap_mib) as child:
            yield from self._modes(child.ask, lengths)

    def _modes(self, weigh: Weigh, lengths: list[int]) -> Iterator[Measurement]:
        for mode, metric in METRICS.items():
            peaks: dict[int, float] = {}
            status = reason = ""
            for length in lengths:
                settings = {"sequence_length": length, "batch_size": self.batch_size}
                peak_mib = weigh(mode, length) if not status else None
                if isinstance(peak_mib, float | int):
                    peaks[length] = peak_mib
                    yield peak_row(metric, peak_mib, settings)
                    continue
                if isinstance(peak_mib, OutOfMemory):
                    status, reason = "out_of_memory", peak_mib.reason
                elif not status:
                    status, reason = "unsupported", UNKNOWN_PEAK
                yield without_number(metric, "MiB", settings, status, reason)
                if status == "out_of_memory":
                    # Longer ones are not tried.
                    reason = f"did not fit at {lengths[len(peaks)]}"
            yield growth(peaks, {"mode": mode, "batch_size": self.batch_size})


def growth(peaks: dict[int, float], settings: dict[str, Any]) -> Measurement:
    points = [(math.log(length), math.log(peak)) for length, peak in sorted(peaks.items()) if peak > 0]
    points = points[-max(3, math.ceil(len(points) / 2)) :]
    if len(points) < 3:
        reason = f"{len(points)} lengths fit, and a slope with its error needs 3"
        return without_number("growth_exponent", "", settings, "unsupported", reason)
    from scipy.stats import linregress

    lengths, peaks_mib = zip(*points, strict=True)
    fit: Any = linregress(lengths, peaks_mib)
    return Measurement(
        metric="growth_exponent",
        value=float(fit.slope),
        unit="",
        settings=settings,
        low=float(fit.slope - fit.stderr),
        high=float(fit.slope + fit.stderr),
        num_samples=len(points),
    )
