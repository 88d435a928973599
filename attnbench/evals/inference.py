"""Speed of reading a prompt and of writing after it, and what a sequence's state weighs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.batches import Batches
from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import STATE, lacks_state, speed_row, state_rows, without_numbers
from attnbench.evals.lib.step_cost import Repetition, lacks_text, settle
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.memory import available_mib, memory_capped
from attnbench.machine.precision import computing, dtype_of
from attnbench.machine.timing import OutOfMemory, Times, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import decoder, read
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value

PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"


class Inference(SystemEvaluation):
    """Times prefill and decoding on real text, in the run's precision; weights cast by it are cast once.

    Prefill reads `sequence_length` tokens of each sequence into an empty state, which it makes, up to the logits of the
    next token; not compiled. Decoding takes one token a sequence and step, the most likely one, from a state that has
    seen `cache_length`; on CUDA the step is captured in a graph, on a CPU it runs as it is. State bytes are those of
    one sequence that may grow to `cache_length`, caches in the compute dtype.

    Args:
        lengths: of what is prefilled, and of what was read before decoding.
        batch_sizes: sequences at a time; every length is measured at each.
        warmup: calls before those that count.
        repeats: calls that count; their median is reported, with the 20th and 80th percentile.
        max_seconds: for the repeats of one setting: where they would take longer there are fewer, at least three.

    Raises:
        UserError: a count that is none.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        (PREFILL, "sequence_length"),
        (DECODE, "cache_length"),
        (STATE, "cache_length"),
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline(
            "decode_tokens_per_second",
            "decode token/s",
            axes=("cache_length", "batch_size"),
            label=("cache_length", "batch_size"),
            higher_is_better=True,
        ),
        Headline(STATE, "bytes of state", axes=("cache_length",)),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "lengths": [16],
        "batch_sizes": [2],
        "warmup": 1,
        "repeats": 3,
        "max_seconds": 1.0,
    }
    one_more: ClassVar[dict[str, Any]] = {"lengths": [16, 32]}

    def __init__(self, *, lengths: list, batch_sizes: list, warmup: int, repeats: int, max_seconds: float) -> None:
        check_counts("eval.inference", lengths=lengths, batch_sizes=batch_sizes, warmup=warmup, repeats=repeats)
        check_value("eval.inference.max_seconds", max_seconds, above=0)
        self.lengths, self.batch_sizes = list(dict.fromkeys(lengths)), list(dict.fromkeys(batch_sizes))
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """The states, which take no time, then setting after setting; one that does not fit is a row that says so."""
        model = subject.new_model().eval()
        yield from state_rows(subject, self.lengths, "cache_length")
        settle(subject)
        for batch_size in self.batch_sizes:
            for length in self.lengths:
                yield from self._speeds(subject, model, length, batch_size)

    def _speeds(self, subject: Subject, model: LanguageModel, length: int, batch_size: int) -> Iterator[Measurement]:
        reason = lacks_state(model) or lacks_text(subject, length, batch_size)
        for metric, num_tokens, measure in (
            (PREFILL, length * batch_size, time_prefill),
            (DECODE, batch_size, time_decoding),
        ):
            settings = _speed_settings(metric, length, batch_size)
            if reason is not None:
                yield from without_numbers({metric: "token/s"}, settings, "unsupported", reason)
                continue
            tokens_BT, dtype = _text(subject, length, batch_size), dtype_of(subject.precision)
            times = _alone(subject, partial(measure, model, tokens_BT, dtype, self.repetition))
            if isinstance(times, OutOfMemory):
                yield from without_numbers({metric: "token/s"}, settings, "out_of_memory", times.reason)
                continue
            yield speed_row(metric, num_tokens, times, settings)


def _speed_settings(metric: str, length: int, batch_size: int) -> dict[str, Any]:
    return {"sequence_length" if metric == PREFILL else "cache_length": length, "batch_size": batch_size}


def _text(subject: Subject, length: int, batch_size: int) -> Tensor:
    batches = Batches(subject.corpus.tokens["train"], length, batch_size, subject.seed, subject.device)
    return batches.train_batch(0)[0]


def _alone(subject: Subject, measure: Callable[[], Times]) -> Times | OutOfMemory:
    """In the run's precision, on its device, without gradients; out of memory is a value."""
    with ExitStack() as stack:
        if subject.device.type == "cuda":
            stack.enter_context(torch.cuda.device(subject.device))
        stack.enter_context(memory_capped(available_mib() if subject.device.type == "cpu" else None))
        stack.enter_context(torch.no_grad())
        # Around all calls of a setting: autocast keeps the weights that it has cast until its end.
        stack.enter_context(computing(subject.precision, subject.device))
        return attempt(measure)


def time_prefill(model: LanguageModel, tokens_BT: Tensor, dtype: torch.dtype, repetition: Repetition) -> Times:
    """Time the prefill of all tokens at once, from an empty state that is made anew each time.

    Args:
        dtype: of the caches.
    """
    batch_size, length = tokens_BT.shape
    last_BL = tokens_BT.new_full((batch_size, 1), length - 1)

    def prefill() -> None:
        model(tokens_BT, model.init_state(batch_size, length, dtype), last_BL)

    return repetition.times(prefill, tokens_BT.device)


def time_decoding(model: LanguageModel, tokens_BT: Tensor, dtype: torch.dtype, repetition: Repetition) -> Times:
    """Time one decoding step behind the tokens, which are read first.

    Args:
        dtype: of the caches.
    """
    batch_size, length = tokens_BT.shape
    # As long as it takes, and no longer: what attends to a cache looks at all of it, filled or not.
    num_untimed = CapturedCall.NUM_WARMUP + 1
    num_steps = num_untimed + repetition.warmup + repetition.repeats
    state = model.init_state(batch_size, length + num_steps, dtype)
    read(model, tokens_BT, state)
    captured = tokens_BT.device.type == "cuda"
    decode = decoder(model, tokens_BT[:, -1].clone(), state, captured=captured)
    for _ in range(num_untimed):
        # The last of them is recorded.
        decode()
    return repetition.times(decode, tokens_BT.device)
