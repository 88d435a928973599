"""Whole models that write: a text from its first token to its last, and one token behind more and more of it."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.bench.base import Subject, error_row
from attnbench.bench.decoding import DECODE
from attnbench.bench.gate import TOLERANCES, GateError
from attnbench.bench.operator import Missing, tried
from attnbench.bench.passes import Repetition
from attnbench.evals.inference import time_decoding
from attnbench.evals.lib import step_cost
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.device import computing, synchronize
from attnbench.mixers.definition import relative_error
from attnbench.model.language_model import LanguageModel, build_model, resolve_mixer
from attnbench.model.matching import match_model
from attnbench.model.sampling import Sampling, Writer, decoder, read
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRECISIONS, MixerSettings, ModelSettings

EAGER, CAPTURED, FASTER = "eager_seconds", "captured_seconds", "captured_faster_percent"
RATE = "tokens_per_second"

PROMPT_LENGTH = 16
SHORT_TEXT = CapturedCall.NUM_WARMUP + 4
"""Tokens written before those that count: enough for a step to be recorded and replayed."""

GATE_STEPS = 8
NO_GRAPHS = "CUDA graphs need CUDA"


class Candidate:
    """A mixer with a kernel of its own choice, in a model of one size.

    Args:
        backend: as attn.backend; `auto` is resolved for the device.

    Raises:
        UserError: the backend cannot run here, or the precision is for operators alone.
    """

    def __init__(self, name: str, backend: str, size: ModelSettings, vocabulary_size: int, subject: Subject) -> None:
        if subject.precision not in PRECISIONS:
            raise UserError(f"precision={subject.precision}: models compute in {', '.join(PRECISIONS)}")
        (given,) = subject.mixers([name])
        given = replace(given, options={**given.options, "backend": backend})
        device_type, precision, trusted = subject.device.type, subject.precision, subject.trusted
        mixer = resolve_mixer(given, size, device_type=device_type, precision=precision, trusted=trusted)
        matched = match_model(
            [mixer] * size.num_layers,
            size,
            match="params",
            seq_len=1,
            vocabulary_size=vocabulary_size,
            precision=precision,
            trusted=trusted,
        )
        self.mixers: list[MixerSettings] = matched.mixers
        self.size, self.vocabulary_size, self.subject = matched.model, vocabulary_size, subject
        self.label = f"{name} ({mixer.options['backend']})"

    def model(self) -> LanguageModel:
        """With initial weights, on the device: what it writes is no text, and takes as long as one.

        Raises:
            UserError: the backend only trains.
        """
        model = build_model(
            self.mixers,
            self.size,
            vocabulary_size=self.vocabulary_size,
            seed=0,
            device=self.subject.device,
            trusted=self.subject.trusted,
        ).eval()
        for block in model.layers:
            backend = getattr(block.mixer, "backend", "")
            if backend in block.mixer.trains_only:
                raise UserError(f"attn.backend={backend}: only trains, it takes no state")
        return model

    def tokens(self, batch_size: int, length: int) -> Tensor:
        """Random ones, (B, T)."""
        generator = torch.Generator().manual_seed(length)
        return torch.randint(self.vocabulary_size, (batch_size, length), generator=generator).to(self.subject.device)


def measure_text(
    candidate: Candidate, num_tokens: int, batch_size: int, repeats: int, settings: dict[str, Any]
) -> Iterator[Measurement]:
    """Seconds of a text of so many tokens by a plain loop and by a captured step, and how much faster the latter is."""
    own, seconds = settings | {"implementation": candidate.label}, {}
    for metric in (EAGER, CAPTURED):
        if metric == CAPTURED and candidate.subject.device.type != "cuda":
            yield from without_numbers({metric: "s"}, own, "unsupported", NO_GRAPHS)
            continue

        def write(metric: str = metric) -> list[Measurement]:
            return _write(candidate, metric, num_tokens, batch_size, repeats, own)

        for row in _attempted({metric: "s"}, own, write):
            if row.metric == metric:
                seconds[metric] = row.value
            yield row
    if seconds.get(EAGER) and seconds.get(CAPTURED):
        faster = 100 * (seconds[EAGER] / seconds[CAPTURED] - 1)
        yield Measurement(metric=FASTER, value=faster, unit="%", settings=own)


def measure_context(
    candidate: Candidate, context: int, batch_size: int, repetition: Repetition, settings: dict[str, Any]
) -> Iterator[Measurement]:
    """Milliseconds of one token behind so many others; the step is captured on CUDA."""
    own = settings | {"implementation": candidate.label}
    yield from _attempted({DECODE: "ms"}, own, lambda: _step(candidate, context, batch_size, repetition, own))


def _attempted(
    units: dict[str, str], settings: dict[str, Any], measure: Callable[[], list[Measurement]]
) -> Iterator[Measurement]:
    found = tried(measure)
    yield from without_numbers(units, settings, *found) if isinstance(found, Missing) else found


@contextmanager
def _decoding(subject: Subject) -> Iterator[None]:
    """On the subject's device, in its precision, without gradients."""
    with ExitStack() as stack:
        if subject.device.type == "cuda":
            stack.enter_context(torch.cuda.device(subject.device))
        stack.enter_context(torch.no_grad())
        # Around all steps: autocast keeps the weights that it has cast until its end.
        stack.enter_context(computing(subject.precision, subject.device))
        yield


def _write(
    candidate: Candidate, metric: str, num_tokens: int, batch_size: int, repeats: int, settings: dict[str, Any]
) -> list[Measurement]:
    subject, captured, found = candidate.subject, metric == CAPTURED, []
    with _decoding(subject):
        model = candidate.model()
        error = _steps_error(candidate, model, captured)
        prompt_BT = candidate.tokens(batch_size, PROMPT_LENGTH)
        writer = Writer(
            model,
            Sampling(batch_size=batch_size, num_characters=candidate.vocabulary_size, device=subject.device),
            batch_size=batch_size,
            max_length=PROMPT_LENGTH + num_tokens,
            dtype=subject.dtype,
            captured=captured,
        )
        for _ in writer.write(prompt_BT, min(SHORT_TEXT, num_tokens)):
            pass
        for _ in range(repeats):
            synchronize(subject.device)
            started = time.perf_counter()
            for _ in writer.write(prompt_BT, num_tokens):
                pass
            synchronize(subject.device)
            found.append(time.perf_counter() - started)
    low, median, high = np.percentile(found, [20, 50, 80]).tolist()
    num_written, form = num_tokens * batch_size, settings | {"form": "captured" if captured else "eager"}
    return [
        Measurement(metric=metric, value=median, unit="s", settings=settings, low=low, high=high, num_samples=repeats),
        Measurement(metric=RATE, value=num_written / median, unit="token/s", settings=form, num_samples=repeats),
        error_row(error, form),
    ]


def _step(
    candidate: Candidate, context: int, batch_size: int, repetition: Repetition, settings: dict[str, Any]
) -> list[Measurement]:
    subject = candidate.subject
    with _decoding(subject):
        model = candidate.model()
        error = _steps_error(candidate, model, subject.device.type == "cuda")
        repeated = step_cost.Repetition(**asdict(repetition))
        times = time_decoding(model, candidate.tokens(batch_size, context), subject.dtype, repeated)
    return [
        error_row(error, settings),
        Measurement(
            metric=DECODE,
            value=times.median_ms,
            unit="ms",
            settings=settings,
            low=times.low_ms,
            high=times.high_ms,
            num_samples=times.num_repeats,
        ),
    ]


def _steps_error(candidate: Candidate, model: LanguageModel, captured: bool) -> float:
    """The relative error of the logits of some steps behind a prompt.

    Raises:
        GateError: it is more than the precision explains.
    """
    subject = candidate.subject
    length = PROMPT_LENGTH + CapturedCall.NUM_WARMUP + GATE_STEPS
    tokens_BT = candidate.tokens(2, length)
    state, token_B, found = model.init_state(2, length, subject.dtype), tokens_BT[:, 0].clone(), []
    read(model, tokens_BT[:, :PROMPT_LENGTH], state)
    step = decoder(model, token_B, state, captured=captured)
    for own_B in tokens_BT[:, PROMPT_LENGTH:].unbind(1):
        token_B.copy_(own_B)
        found.append(step().clone())
    error = relative_error(torch.stack(found, dim=1), _definition(model, tokens_BT)[:, PROMPT_LENGTH:])
    tolerance = TOLERANCES[subject.precision]
    # Written so that a NaN, which compares false with everything, is an error.
    if not error <= tolerance:
        raise GateError(f"its steps' logits are off by {error:.2g}, and {subject.precision} explains {tolerance:g}")
    return error


def _definition(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Logits in float64, every mixer by its slow definition."""
    with torch.autocast(tokens_BT.device.type, enabled=False):
        wide = copy.deepcopy(model).double()
        x_BTD = wide.embed(tokens_BT)
        for block in wide.layers:
            x_BTD = block.feed(x_BTD + block.mixer.reference(block.mixer_norm(x_BTD)))
        return wide.embedding.logits(wide.norm(x_BTD))
