"""Whole models that generate: a text, and one token after a growing context."""

import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.bench.base import error_row, rows_or_reason
from attnbench.bench.operators.decoding import DECODE
from attnbench.bench.operators.gate import TOLERANCES, GateError
from attnbench.bench.operators.language_models import Candidate
from attnbench.evals.inference import generating, time_decoding
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.device import synchronize
from attnbench.mixers.definition import relative_error
from attnbench.model.language_model import LanguageModel
from attnbench.model.sampling import Sampling, Writer, decoder, read
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

EAGER, CAPTURED, FASTER = "eager_seconds", "captured_seconds", "captured_faster_percent"
RATE = "tokens_per_second"

PROMPT_LENGTH = 16
SHORT_TEXT = CapturedCall.NUM_WARMUP + 4
"""Tokens generated before those that count: enough to record and replay a step."""

GATE_STEPS = 8
NO_GRAPHS = "CUDA graphs need CUDA"


def measure_text(
    candidate: Candidate, num_tokens: int, batch_size: int, repeats: int, settings: dict[str, Any]
) -> Iterator[Measurement]:
    settings, seconds = settings | {"implementation": candidate.label}, {}
    for metric in (EAGER, CAPTURED):
        if metric == CAPTURED and candidate.conditions.device.type != "cuda":
            yield from without_numbers({metric: "s"}, settings, "unsupported", NO_GRAPHS)
            continue
        measure = partial(_time_text, candidate, metric, num_tokens, batch_size, repeats, settings)
        for row in rows_or_reason({metric: "s"}, settings, measure):
            if row.metric == metric:
                seconds[metric] = row.value
            yield row
    if seconds.get(EAGER) and seconds.get(CAPTURED):
        faster = 100 * (seconds[EAGER] / seconds[CAPTURED] - 1)
        yield Measurement(metric=FASTER, value=faster, unit="%", settings=settings)


def measure_context(
    candidate: Candidate, context: int, batch_size: int, repetition: Timed, settings: dict[str, Any]
) -> Iterator[Measurement]:
    """Yield milliseconds of one token behind `context` others; the step is captured on CUDA."""
    settings, conditions = settings | {"implementation": candidate.label}, candidate.conditions

    def measure() -> list[Measurement]:
        with generating(conditions.device, conditions.precision):
            model = _model(candidate)
            error = _steps_error(candidate, model, conditions.device.type == "cuda")
            times = time_decoding(model, _tokens(candidate, batch_size, context), conditions.dtype, repetition)
        return [error_row(error, settings), time_row(times, settings, DECODE)]

    yield from rows_or_reason({DECODE: "ms"}, settings, measure)


def _model(candidate: Candidate) -> LanguageModel:
    model = candidate.build().eval()
    if backend := model.backend_without_state:
        raise UserError(f"attn.backend={backend}: only trains, it takes no state")
    return model


def _tokens(candidate: Candidate, batch_size: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    tokens_BT = torch.randint(candidate.vocabulary_size, (batch_size, length), generator=generator)
    return tokens_BT.to(candidate.conditions.device)


def _time_text(
    candidate: Candidate, metric: str, num_tokens: int, batch_size: int, repeats: int, settings: dict[str, Any]
) -> list[Measurement]:
    conditions, captured, times = candidate.conditions, metric == CAPTURED, []
    with generating(conditions.device, conditions.precision):
        model = _model(candidate)
        error = _steps_error(candidate, model, captured)
        prompt_BT = _tokens(candidate, batch_size, PROMPT_LENGTH)
        writer = Writer(
            model,
            Sampling(batch_size=batch_size, num_characters=candidate.vocabulary_size, device=conditions.device),
            batch_size=batch_size,
            max_length=PROMPT_LENGTH + num_tokens,
            dtype=conditions.dtype,
            captured=captured,
        )
        for _ in writer.write(prompt_BT, min(SHORT_TEXT, num_tokens)):
            pass
        for _ in range(repeats):
            synchronize(conditions.device)
            started = time.perf_counter()
            for _ in writer.write(prompt_BT, num_tokens):
                pass
            synchronize(conditions.device)
            times.append(time.perf_counter() - started)
    low, median, high = np.percentile(times, [20, 50, 80]).tolist()
    num_written, form = num_tokens * batch_size, settings | {"form": "captured" if captured else "eager"}
    return [
        Measurement(metric=metric, value=median, unit="s", settings=settings, low=low, high=high, num_samples=repeats),
        Measurement(metric=RATE, value=num_written / median, unit="token/s", settings=form, num_samples=repeats),
        error_row(error, form),
    ]


def _steps_error(candidate: Candidate, model: LanguageModel, captured: bool) -> float:
    """Compare the logits of some steps behind a prompt with the definition's; raise GateError for a wrong one."""
    conditions = candidate.conditions
    length = PROMPT_LENGTH + CapturedCall.NUM_WARMUP + GATE_STEPS
    tokens_BT = _tokens(candidate, 2, length)
    state, token_B, logits = model.init_state(2, length, conditions.dtype), tokens_BT[:, 0].clone(), []
    read(model, tokens_BT[:, :PROMPT_LENGTH], state)
    step = decoder(model, token_B, state, captured=captured)
    for next_B in tokens_BT[:, PROMPT_LENGTH:].unbind(1):
        token_B.copy_(next_B)
        logits.append(step().clone())
    error = relative_error(torch.stack(logits, dim=1), _definition(model, tokens_BT)[:, PROMPT_LENGTH:])
    tolerance = TOLERANCES[conditions.precision]
    # Written so that a NaN fails.
    if not error <= tolerance:
        raise GateError(f"its steps' logits are off by {error:.2g}, and {conditions.precision} explains {tolerance:g}")
    return error


def _definition(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    with torch.autocast(tokens_BT.device.type, enabled=False):
        wide = copy.deepcopy(model).double()
        x_BTD = wide.embed(tokens_BT)
        for block in wide.layers:
            x_BTD = block.feed(x_BTD + block.mixer.reference(block.mixer_norm(x_BTD)))
        return wide.logits(wide.norm(x_BTD))
