from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attnbench.data.batches import Batches
from attnbench.evals.base import Subject, SystemEvaluation
from attnbench.evals.lib.rows import STATE, lacks_state, speed_row, state_rows, without_number
from attnbench.evals.lib.step_cost import Timed, lacks_text, settle
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.memory import available_mib, memory_capped
from attnbench.machine.precision import computing, dtype_of
from attnbench.machine.timing import OutOfMemory, Times, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import decoder, read
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option

PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"


class Inference(Timed, SystemEvaluation):
    """Prefill and decoding, over lengths and batch sizes, in the run's precision; weights cast by it are cast once.

    Prefill reads `sequence_length` tokens of each sequence into a new state, up to the next token's logits; not
    compiled. Decoding takes the most likely token of each sequence, after `cache_length` tokens; on CUDA the step is
    captured in a graph. State bytes are those of one sequence, caches in the compute dtype. Times are medians, with the
    20th and 80th percentile.
    """

    lengths: list[int] = option(
        [256, 1024, 8192], "characters of a prompt, and of what was read before decoding", minimum=1
    )
    batch_sizes: list[int] = option([1, 128], "sequences at a time, each at every length", minimum=1)
    repeats, max_seconds = 50, 10

    plots = ((PREFILL, "sequence_length"), (DECODE, "cache_length"), (STATE, "cache_length"))
    headline = (
        Headline(
            "decode_tokens_per_second",
            "decode token/s",
            axes=("cache_length", "batch_size"),
            label=("cache_length", "batch_size"),
            higher_is_better=True,
        ),
        Headline(STATE, "bytes of state", axes=("cache_length",)),
    )
    smoke = {"lengths": [16], "batch_sizes": [2], "warmup": 1, "repeats": 3, "max_seconds": 1.0}
    one_more = {"lengths": [16, 32]}

    def run(self, subject: Subject) -> Iterator[Measurement]:
        model, lengths = subject.new_model().eval(), list(dict.fromkeys(self.lengths))
        yield from state_rows(subject, lengths, "cache_length")
        settle(subject)
        for batch_size, length in product(dict.fromkeys(self.batch_sizes), lengths):
            yield from self._speeds(subject, model, length, batch_size)

    def _speeds(self, subject: Subject, model: LanguageModel, length: int, batch_size: int) -> Iterator[Measurement]:
        reason = lacks_state(model) or lacks_text(subject, length, batch_size)
        for metric, axis, num_tokens, measure in (
            (PREFILL, "sequence_length", length * batch_size, time_prefill),
            (DECODE, "cache_length", batch_size, time_decoding),
        ):
            settings = {axis: length, "batch_size": batch_size}
            if reason is not None:
                yield without_number(metric, "token/s", settings, "unsupported", reason)
                continue
            text = Batches(subject.corpus.tokens["train"], length, batch_size, subject.seed, subject.device)
            tokens_BT, dtype = text.train_batch(0)[0], dtype_of(subject.precision)
            cap_mib = available_mib() if subject.device.type == "cpu" else None
            with memory_capped(cap_mib), generating(subject.device, subject.precision):
                times = attempt(partial(measure, model, tokens_BT, dtype, self))
            if isinstance(times, OutOfMemory):
                yield without_number(metric, "token/s", settings, "out_of_memory", times.reason)
            else:
                yield speed_row(metric, num_tokens, times, settings)


@contextmanager
def generating(device: torch.device, precision: str) -> Iterator[None]:
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.no_grad())
        # Around all calls: autocast keeps cast weights until it ends.
        stack.enter_context(computing(precision, device))
        yield


def time_prefill(model: LanguageModel, tokens_BT: Tensor, dtype: torch.dtype, repetition: Timed) -> Times:
    batch_size, length = tokens_BT.shape
    last_BL = tokens_BT.new_full((batch_size, 1), length - 1)

    def prefill() -> None:
        model(tokens_BT, model.init_state(batch_size, length, dtype), last_BL)

    return repetition.times(prefill, tokens_BT.device)


def time_decoding(model: LanguageModel, tokens_BT: Tensor, dtype: torch.dtype, repetition: Timed) -> Times:
    batch_size, length = tokens_BT.shape
    # A short cache, because attention reads all of it, filled or not.
    num_untimed = CapturedCall.NUM_WARMUP + 1
    num_steps = num_untimed + repetition.warmup + repetition.repeats
    state = model.init_state(batch_size, length + num_steps, dtype)
    read(model, tokens_BT, state)
    captured = tokens_BT.device.type == "cuda"
    decode = decoder(model, tokens_BT[:, -1].clone(), state, captured=captured)
    for _ in range(num_untimed):
        # The last one is recorded.
        decode()
    return repetition.times(decode, tokens_BT.device)
