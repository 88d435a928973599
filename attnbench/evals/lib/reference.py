"""A reference beside timed rows: torch's own softmax layers at the run's size, for every mixer.

One layer is timed, forward and backward, and counted once for each layer of the model; on a CPU over one sequence,
counted for each of a batch. It is not compiled, which would take longer than all its repeats. On a GPU the host's
launches are hidden behind other work of the device.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import mean

import torch
from torch import nn

from attnbench.machine.device import keep_freed_memory
from attnbench.machine.precision import computing
from attnbench.machine.timing import ColdCaches, OutOfMemory, attempt, time_repeats
from attnbench.results.metrics import is_timed
from attnbench.results.rows import REFERENCE, REFERENCE_RATIO, Measurement
from attnbench.settings.schema import ModelSettings
from attnbench.training.job import Run


def beside_reference(run: Run, measured: Iterator[Measurement]) -> Iterator[Measurement]:
    """Add to timed rows the reference's milliseconds before and after, their ratio to it, and the load average.

    `measured` measures as it is read; adjacent timed rows of the same settings come from one measurement.
    """
    before, former, told = _reference_ms(run), None, {}
    for row in measured:
        if row.value is None or not is_timed(row.metric, row.unit):
            yield row
            continue
        if row.settings != former:
            after = _reference_ms(run)
            told = {REFERENCE: [ms for ms in (before, after) if ms is not None], **_load_average()}
            before, former = after, row.settings
        yield replace(row, settings={**row.settings, **told, **_ratio(row, told[REFERENCE], run)})


def _ratio(row: Measurement, reference_ms: list[float], run: Run) -> dict[str, float]:
    """Return a time over the reference's, or a speed over its speed."""
    if not reference_ms or row.value is None:
        return {}
    num_tokens, milliseconds = _batch_size(run) * run.seq_len, mean(reference_ms)
    per_unit = {"ms": milliseconds, "s": milliseconds / 1e3, "token/s": num_tokens / milliseconds * 1e3}
    return {REFERENCE_RATIO: row.value / per_unit[row.unit]} if row.unit in per_unit else {}


def _load_average() -> dict[str, float]:
    return {"load_average": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}


def _reference_ms(run: Run) -> float | None:
    """Return the time over a batch; None if it does not fit into memory."""
    is_cpu, batch_size, model = run.device.type == "cpu", _batch_size(run), run.settings.model
    if is_cpu:
        keep_freed_memory()
    # A CPU takes as long for each sequence; on a GPU one would not fill the device.
    num_timed = 1 if is_cpu else batch_size
    ms = attempt(partial(_layer_ms, model, num_timed, run.seq_len, run.precision, run.device))
    return None if isinstance(ms, OutOfMemory) else ms * model.num_layers * batch_size / num_timed


def _batch_size(run: Run) -> int:
    return run.settings.train.micro_batch_size or run.settings.train.batch_size


def _layer_ms(model: ModelSettings, batch_size: int, length: int, precision: str, device: torch.device) -> float:
    # What is measured must draw the same numbers as without a reference.
    most_heads = max(1, model.dim // model.head_width)
    # torch's layer takes divisors of its width alone.
    num_heads = next(number for number in range(most_heads, 0, -1) if model.dim % number == 0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        layer = nn.TransformerEncoderLayer(
            model.dim,
            num_heads,
            max(1, model.feed_forward_width),
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            device=device,
        )
        x_BTD = torch.randn(batch_size, length, model.dim, device=device)
    mask_TT = nn.Transformer.generate_square_subsequent_mask(length, device=device)

    def passes() -> None:
        layer(x_BTD, src_mask=mask_TT, is_causal=True).sum().backward()

    with computing(precision, device):
        return time_repeats(passes, device, warmup=3, repeats=9, max_seconds=1, before=ColdCaches(device)).median_ms
