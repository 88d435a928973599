"""Whole language models of published sizes: milliseconds of a forward pass, and of a forward with a backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Conditions,
    Missing,
    TimedBench,
    attempted,
    error_row,
    rows_or_reason,
    time_rows,
)
from attnbench.bench.operators.gate import mixer_error
from attnbench.bench.operators.language_models import Candidate, model_of, resolved
from attnbench.bench.operators.roofline import Work
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import computing
from attnbench.machine.timing import Times, time_repeats
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings, ModelSettings
from attnbench.training.step import Batch, batch_nats, loss_and_gradients

PARAMETERS = "parameters"
PASSES = {"forward": 1, "total": 3}
"""Forward, forward with backward, and how many forward passes' operations each has."""

UNITS = {f"{name}{MILLISECONDS}": "ms" for name in PASSES} | {MAX_ERROR: ""}


@dataclass(kw_only=True)
class ModelsBench(TimedBench):
    """Times models with initial weights on random tokens, not compiled.

    On CUDA each call is replayed as a CUDA graph: the device's work, not how fast the host issues it. The forward pass
    goes up to the loss and records nothing for a backward pass. Each mixer's model has the feed-forward width that
    meets softmax's parameters at that size.

    Args:
        sizes: [name, width, feed-forward width, layers, heads] each.
        mixers: names of yamls of attn/.
        vocabulary_size: symbols.
        batch_size, length: of the tokens.

    Raises:
        UserError: a count that is none, a size that is no name and four of them, or no mixer.
    """

    sizes: list
    mixers: list
    vocabulary_size: int
    batch_size: int
    length: int

    layouts: ClassVar[tuple[Layout, ...]] = (
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
    numbers_version: ClassVar[int] = 1
    notes: ClassVar[tuple[str, ...]] = (
        "Nothing is compiled. On CUDA each call is replayed as a CUDA graph, so that these are the device's times and "
        "not those of a host that issues kernel after kernel.",
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("total_milliseconds", "forward and backward ms", label=("size",), pick="each"),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "sizes": [["smoke", 32, 24, 2, 2]],
        "mixers": ["softmax", "linear"],
        "vocabulary_size": 32,
        "batch_size": 1,
        "length": 16,
        "warmup": 1,
        "repeats": 3,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.models = {model.name: model for model in map(_named_size, self.sizes)}
        given = {"sizes": (self.sizes, self.models), "mixers": (self.mixers, set(map(str, self.mixers)))}
        for name, (values, different) in given.items():
            if not values or len(different) < len(values):
                raise UserError(f"bench.{name}={values}: must name at least one, and none twice")

    @property
    def mixer_names(self) -> Sequence[str]:
        return self.mixers

    def cells(self) -> Iterator[dict[str, Any]]:
        for name in self.models:
            yield {"size": name, "batch_size": self.batch_size, "sequence_length": self.length}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        size = self.models[cell["size"]]
        for mixer in conditions.mixers(self.mixers):
            settings = cell | {"implementation": mixer.name, "backend": ""}
            chosen = attempted(lambda mixer=mixer: resolved(mixer, size, conditions))
            if isinstance(chosen, Missing):
                yield from without_numbers(UNITS, settings, *chosen)
                continue
            settings |= {"backend": chosen.options["backend"]}
            yield from rows_or_reason(UNITS, settings, self._measure_one(chosen, size, settings, conditions))

    def _measure_one(
        self, mixer: MixerSettings, size: ModelSettings, settings: dict[str, Any], conditions: Conditions
    ) -> Callable[[], Iterable[Measurement]]:
        def measure() -> Iterator[Measurement]:
            error = mixer_error(mixer, size.head_width, conditions.device, conditions.precision)
            candidate = Candidate(
                mixer=mixer,
                size=size,
                vocabulary_size=self.vocabulary_size,
                length=self.length,
                conditions=conditions,
            )
            yield error_row(error, settings)
            yield from self._times(candidate.build(), settings, conditions)

        return measure

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
            # Weights are float32 and are read once a pass, their gradients written once.
            work = Work(PASSES[name] * flops * self.batch_size, 4 * parameters * (1 if name == "forward" else 3))
            yield from time_rows(name, times, settings, work.floor_ms(conditions.ceilings))

    def _timed(self, call: Callable[[], object], device: torch.device) -> Times:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if device.type == "cuda":
                call = CapturedCall(call)
                for _ in range(CapturedCall.NUM_WARMUP + 1):
                    # The last of them is recorded.
                    call()
            return time_repeats(call, device, **asdict(self.repetition))


def _named_size(size: Any) -> ModelSettings:
    if not isinstance(size, list) or len(size) != 5:
        raise UserError(f"bench.sizes: {size} must be [name, width, feed-forward width, layers, heads]")
    name, *numbers = size
    return model_of(numbers, f"bench.sizes: {name}", str(name))
