from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Bench,
    Conditions,
    error_row,
    time_rows,
)
from attnbench.bench.operators.gate import mixer_error
from attnbench.bench.operators.language_models import Candidate, by_mixer, model_of
from attnbench.bench.operators.roofline import Work
from attnbench.bench.tables import Layout, Values
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import computing
from attnbench.machine.timing import Times
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.settings.schema import MixerSettings, ModelSettings
from attnbench.training.step import Batch, batch_nats, loss_and_gradients

PARAMETERS = "parameters"
PASSES = {"forward": 1, "total": 3}
"""Number of forward passes' operations of each pass."""

UNITS = {f"{name}{MILLISECONDS}": "ms" for name in PASSES} | {MAX_ERROR: ""}


class ModelsBench(Bench):
    """Whole language models of published sizes: milliseconds of a forward pass, and of one with its backward pass.

    Models have initial weights and read random tokens, not compiled. On CUDA each call is replayed as a CUDA graph. The
    forward pass goes up to the loss and records nothing for a backward pass. Each mixer's model has the feed-forward
    width that meets softmax's parameters at that size.
    """

    sizes: list = option(
        [
            ["small", 768, 3072, 12, 12],
            ["medium", 1024, 4096, 24, 16],
            ["large", 1280, 5120, 36, 20],
            ["2.7B", 2560, 10240, 32, 32],
        ],
        "[name, width, feed-forward width, layers, heads]",
    )
    mixers: list[str] = option(
        ["softmax", "flash", "linear", "gated_deltanet"], "names of yamls of attn/", distinct=True
    )
    vocabulary_size: int = option(10000, "symbols", minimum=1)
    batch_size: int = option(4, "sequences a step", minimum=1)
    length: int = option(512, "positions", minimum=1)
    repeats, max_seconds = 10, 3

    layouts = (
        Layout(
            title="ms, forward alone and with backward",
            lines=("size", "implementation", "backend"),
            columns="",
            values=(
                Values(metric=PARAMETERS, header="parameters"),
                Values(metric=f"forward{MILLISECONDS}", header="forward"),
                Values(metric=f"total{MILLISECONDS}", header="total"),
                Values(metric=ROOFLINE, header="total, roof", where={"pass": "total"}, is_share=True),
                Values(metric=MAX_ERROR, header="error of a layer"),
            ),
        ),
    )
    # 1: replayed on CUDA.
    numbers_version = 1
    notes = (
        "Nothing is compiled. On CUDA each call is replayed as a CUDA graph, so that these are the device's times and "
        "not those of a host that issues kernel after kernel.",
    )
    headline = (Headline("total_milliseconds", "forward and backward ms", label=("size",), pick="each"),)
    smoke = {
        **{"sizes": [["smoke", 32, 24, 2, 2]], "mixers": ["softmax", "linear"], "vocabulary_size": 32},
        **{"batch_size": 1, "length": 16, "warmup": 1, "repeats": 3},
    }

    def __post_init__(self) -> None:
        self.models = {model.name: model for model in map(_named_size, self.sizes)}
        if not self.sizes or len(self.models) < len(self.sizes):
            raise UserError(f"bench.sizes={self.sizes}: must name at least one, and none twice")

    @property
    def mixer_names(self) -> Sequence[str]:
        return self.mixers

    def cells(self) -> Iterator[dict[str, Any]]:
        for name in self.models:
            yield {"size": name, "batch_size": self.batch_size, "sequence_length": self.length}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        size = self.models[cell["size"]]

        def rows(mixer: MixerSettings, settings: dict[str, Any]) -> Iterator[Measurement]:
            error = mixer_error(mixer, size.head_width, conditions.device, conditions.precision)
            given = {"vocabulary_size": self.vocabulary_size, "length": self.length, "conditions": conditions}
            model = Candidate(mixer=mixer, size=size, **given).build()
            yield error_row(error, settings)
            yield from self._times(model, settings, conditions)

        yield from by_mixer(self.mixers, size, UNITS, cell, conditions, rows)

    def _times(self, model: LanguageModel, settings: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        device, precision = conditions.device, conditions.precision
        generator = torch.Generator(device).manual_seed(0)
        shape = (2, self.batch_size, self.length)
        tokens, targets = torch.randint(self.vocabulary_size, shape, generator=generator, device=device)
        batch = Batch(tokens, targets, None, None)

        def forward() -> None:
            with torch.no_grad(), computing(precision, device):
                batch_nats(model, batch)

        calls: dict[str, Callable[[], object]] = {
            "forward": forward,
            "total": lambda: loss_and_gradients(model, batch, None, precision),
        }
        parameters = model.num_parameters()
        flops = model.forward_flops(self.length)
        assert flops is not None, "a mixer of attnbench's own"
        yield Measurement(metric=PARAMETERS, value=parameters, unit="", settings=settings)
        for name, call in calls.items():
            times = self._timed(call, device)
            # Weights are float32 and read once a pass, their gradients written once.
            work = Work(PASSES[name] * flops * self.batch_size, 4 * parameters * (1 if name == "forward" else 3))
            yield from time_rows(name, times, settings, work.floor_ms(conditions.ceilings))

    def _timed(self, call: Callable[[], object], device: torch.device) -> Times:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if device.type == "cuda":
                call = CapturedCall(call)
                for _ in range(CapturedCall.NUM_WARMUP + 1):
                    # The last one is recorded.
                    call()
            return self.times(call, device)


def _named_size(size: Any) -> ModelSettings:
    if not isinstance(size, list) or len(size) != 5:
        raise UserError(f"bench.sizes: {size} must be [name, width, feed-forward width, layers, heads]")
    name, *numbers = size
    return model_of(numbers, f"bench.sizes: {name}", str(name))
