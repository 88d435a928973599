"""Peak memory of a forward pass and of a training pass as the sequence grows, and of the state while decoding."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import doublings, state_rows, without_numbers
from attnbench.machine.device import start_afresh
from attnbench.machine.memory import reset_resident_peak, resident_peak_mib, return_freed_memory
from attnbench.machine.precision import computing
from attnbench.machine.timing import UNKNOWN_PEAK, CappedChild, OutOfMemory, attempt
from attnbench.model.dropout import row_keys
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts
from attnbench.settings.errors import UserError
from attnbench.training.step import Batch, loss_and_gradients

METRICS = {"forward": "forward_peak_mib", "training": "training_peak_mib"}
"""The metric of each mode: a forward pass without gradient, or forward and backward of the loss."""

Weigh = Callable[[str, int], float | OutOfMemory | None]
"""Peak MiB of a pass in a mode at a length; None where the system does not tell."""


class Memory(SystemEvaluation):
    """Peak memory above the weights on random tokens, at lengths that double until one no longer fits.

    Not compiled: compiling every length would take longer than all the rest, and fuse what surrounds the mixer.

    On CUDA the peak is what torch's allocator has handed out. What it has reserved is what must be free on the device,
    and throughput reports that; but it comes in blocks of 2 and 20 MiB, which at short lengths would hide the growth
    that is compared here. On a CPU it is the resident set of a child process whose memory is capped.

    `growth_exponent` is the slope of log(peak) over log(length) through the upper half of the lengths that fit, at
    least three of them, one standard error down and up: 1 where memory grows as the length, 2 as its square.

    Args:
        min_length: the first length.
        max_length: the last on CUDA, if it fits.
        cpu_max_length: the last on a CPU.
        cpu_cap_mib: what a pass may take on a CPU; beyond it, it does not fit.

    Raises:
        UserError: a count that is none, or a last length below the first.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("forward_peak_mib", "sequence_length"),
        ("training_peak_mib", "sequence_length"),
        ("state_bytes", "sequence_length"),
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("training_peak_mib", "training MiB", axes=("sequence_length", "batch_size")),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "min_length": 32,
        "max_length": 128,
        "cpu_max_length": 128,
        "batch_size": 2,
        "cpu_cap_mib": 512,
    }
    one_more: ClassVar[dict[str, Any]] = {"min_length": 16}

    def __init__(
        self, *, min_length: int, max_length: int, cpu_max_length: int, batch_size: int, cpu_cap_mib: int
    ) -> None:
        last = {"max_length": max_length, "cpu_max_length": cpu_max_length}
        check_counts("eval.memory", min_length=min_length, batch_size=batch_size, cpu_cap_mib=cpu_cap_mib, **last)
        for name, length in last.items():
            if length < min_length:
                raise UserError(f"eval.memory.{name}={length}: must be at least min_length={min_length}")
        self.min_length, self.max_length, self.cpu_max_length = min_length, max_length, cpu_max_length
        self.batch_size, self.cpu_cap_mib = batch_size, cpu_cap_mib

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """The states, which take no time, then length after length of each mode, and its growth."""
        is_cpu = subject.device.type == "cpu"
        lengths = doublings(self.min_length, self.cpu_max_length if is_cpu else self.max_length)
        yield from state_rows(subject, lengths, "sequence_length")
        if not is_cpu:
            weigh = partial(_weigh_on_device, subject.builder(), self.batch_size, subject.precision, subject.device)
            yield from self._modes(weigh, lengths)
            return
        prepare = partial(_resident_weigher, subject.builder(), self.batch_size, subject.precision)
        with CappedChild(prepare, self.cpu_cap_mib) as child:
            yield from self._modes(child.ask, lengths)

    def _modes(self, weigh: Weigh, lengths: list[int]) -> Iterator[Measurement]:
        for mode, metric in METRICS.items():
            peaks: dict[int, float] = {}
            failure: dict[str, Any] = {}
            for length in lengths:
                if not failure:
                    peak_mib = weigh(mode, length)
                    if isinstance(peak_mib, OutOfMemory):
                        failure = {"status": "out_of_memory", "reason": peak_mib.reason}
                    elif peak_mib is None:
                        failure = {"status": "unsupported", "reason": UNKNOWN_PEAK}
                    else:
                        peaks[length] = peak_mib
                yield Measurement(
                    metric=metric,
                    value=peaks.get(length),
                    unit="MiB",
                    settings={"sequence_length": length, "batch_size": self.batch_size},
                    **failure,
                )
                if failure.get("status") == "out_of_memory":
                    # What is longer is not tried.
                    failure["reason"] = f"did not fit at {lengths[len(peaks)]}"
            yield growth(peaks, {"mode": mode, "batch_size": self.batch_size})


def growth(peaks: dict[int, float], settings: dict[str, Any]) -> Measurement:
    """The row `growth_exponent` of peaks by length, see Memory."""
    # Below a page there is nothing to take a logarithm of.
    points = [(math.log(length), math.log(peak)) for length, peak in sorted(peaks.items()) if peak > 0]
    points = points[-max(3, math.ceil(len(points) / 2)) :]
    if len(points) < 3:
        reason = f"{len(points)} lengths fit, and a slope with its error needs 3"
        [row] = without_numbers({"growth_exponent": ""}, settings, "unsupported", reason)
        return row
    # Imported here: it takes a while to load, and only this needs it.
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


def _pass(model: LanguageModel, mode: str, length: int, batch_size: int, precision: str) -> Callable[[], object]:
    """The pass that is weighed, on random tokens that are there before."""
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, batch_size, length)
    tokens_BT, targets_BT = torch.randint(
        model.embedding.num_embeddings, shape, device=device, generator=generator
    ).unbind()
    keys_B = row_keys(0, 0, torch.arange(batch_size, device=device)) if model.dropout else None

    def forward() -> None:
        with torch.no_grad(), computing(precision, device):
            model(tokens_BT)

    def training() -> None:
        loss_and_gradients(model, Batch(tokens_BT, targets_BT, dropout_B=keys_B), None, precision)

    return forward if mode == "forward" else training


def _weigh_on_device(
    builder: Callable[[], LanguageModel],
    batch_size: int,
    precision: str,
    device: torch.device,
    mode: str,
    length: int,
) -> float | OutOfMemory:
    def weigh() -> float:
        start_afresh(device)
        # A new model each time: a backward pass that did not fit leaves gradients on the old one.
        run = _pass(builder(), mode, length, batch_size, precision)
        # Once before: what kernels try out to choose their blocks, and cuBLAS's workspace, are not the pass's own.
        run()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20

    return attempt(weigh)


def _resident_weigher(builder: Callable[[], LanguageModel], batch_size: int, precision: str) -> Weigh:
    """Called in the child: the model, and what weighs its passes one after the other."""
    return_freed_memory()
    model = builder()

    def weigh(mode: str, length: int) -> float | None:
        run = _pass(model, mode, length, batch_size, precision)
        before_mib = reset_resident_peak()
        run()
        return None if before_mib is None else resident_peak_mib() - before_mib

    for mode in METRICS:
        # Once at a short length: threads and what libraries load on first use are no part of a pass.
        _pass(model, mode, 16, batch_size, precision)()
    return weigh
