"""Whole language models of published sizes: milliseconds of a forward pass, and of a forward with a backward pass."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, ROOFLINE, Bench, Layout, Subject, Values, error_row, timed
from attnbench.bench.gate import mixer_error
from attnbench.bench.operator import Missing, tried
from attnbench.bench.passes import Repetition
from attnbench.bench.roofline import Work
from attnbench.evals.lib.rows import check_counts, without_numbers
from attnbench.machine.device import computing
from attnbench.machine.timing import time_repeats
from attnbench.model.language_model import LanguageModel, build_model, resolve_mixer
from attnbench.model.matching import match_model
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings, ModelSettings, check
from attnbench.training.loop import Batch, batch_nats, loss_and_gradients

PARAMETERS = "parameters"
PASSES = {"forward": 1, "total": 3}
"""Forward, forward with backward, and how many forward passes' operations each has."""


class ModelsBench(Bench):
    """Times models with initial weights on random tokens, not compiled, each call as the host issues it.

    The forward pass goes up to the loss and records nothing for a backward pass. Each mixer's model has the
    feed-forward width that meets softmax's parameters at that size.

    Args:
        sizes: [name, width, feed-forward width, layers, heads] each.
        mixers: names of yamls of attn/.
        vocabulary_size: symbols.
        batch_size, length: of the tokens.
        warmup, repeats: calls before those that count, and those that count, at most.
        max_seconds: for the repeats of one pass: fewer where they would take longer, at least three.

    Raises:
        UserError: a count that is none, a size that is no name and four of them, or no mixer.
    """

    title: ClassVar[str] = "Models of published sizes"
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
    smoke: ClassVar[dict[str, Any]] = {
        "sizes": [["smoke", 32, 24, 2, 2]],
        "mixers": ["softmax", "linear"],
        "vocabulary_size": 32,
        "batch_size": 1,
        "length": 16,
        "warmup": 1,
        "repeats": 3,
    }

    def __init__(
        self,
        *,
        sizes: list,
        mixers: list,
        vocabulary_size: int,
        batch_size: int,
        length: int,
        warmup: int,
        repeats: int,
        max_seconds: float,
    ) -> None:
        check_counts("bench", vocabulary_size=vocabulary_size, batch_size=batch_size, length=length)
        check_counts("bench", warmup=warmup, repeats=repeats)
        self.sizes = {model.name: model for model in map(_model, sizes)}
        for name, given, different in (("sizes", sizes, self.sizes), ("mixers", mixers, set(map(str, mixers)))):
            if not given or len(different) < len(given):
                raise UserError(f"bench.{name}={given}: must name at least one, and none twice")
        self.mixers, self.vocabulary_size, self.batch_size, self.length = mixers, vocabulary_size, batch_size, length
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    @property
    def mixer_names(self) -> Sequence[str]:
        return self.mixers

    def cells(self) -> Iterator[dict[str, Any]]:
        for name in self.sizes:
            yield {"size": name, "batch_size": self.batch_size, "sequence_length": self.length}

    def measure(self, cell: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
        for mixer in subject.mixers(self.mixers):
            settings = cell | {"implementation": mixer.name, "backend": ""}
            yield from self._measure_one(mixer, self.sizes[cell["size"]], settings, subject)

    def _measure_one(
        self, mixer: MixerSettings, size: ModelSettings, settings: dict[str, Any], subject: Subject
    ) -> Iterator[Measurement]:
        resolved = tried(
            lambda: resolve_mixer(
                mixer, size, device_type=subject.device.type, precision=subject.precision, trusted=subject.trusted
            )
        )
        if isinstance(resolved, Missing):
            yield from _without(settings, *resolved)
            return
        settings = settings | {"backend": resolved.options["backend"]}
        found = tried(lambda: self._measured(resolved, size, settings, subject))
        yield from _without(settings, *found) if isinstance(found, Missing) else found

    def _measured(
        self, mixer: MixerSettings, size: ModelSettings, settings: dict[str, Any], subject: Subject
    ) -> list[Measurement]:
        error = mixer_error(mixer, size.head_width, subject.device, subject.precision, subject.trusted)
        matched = match_model(
            [mixer] * size.num_layers,
            size,
            match="params",
            seq_len=self.length,
            vocabulary_size=self.vocabulary_size,
            precision=subject.precision,
            trusted=subject.trusted,
        )
        model = build_model(
            matched.mixers,
            matched.model,
            vocabulary_size=self.vocabulary_size,
            seed=0,
            device=subject.device,
            trusted=subject.trusted,
        )
        return [error_row(error, settings), *self._times(model, settings, subject)]

    def _times(self, model: LanguageModel, settings: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
        device, precision = subject.device, subject.precision
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
        flops = model.forward_flops(self.length) * self.batch_size
        yield Measurement(metric=PARAMETERS, value=parameters, unit="", settings=settings)
        for name, call in calls.items():
            times = time_repeats(
                call,
                device,
                warmup=self.repetition.warmup,
                repeats=self.repetition.repeats,
                max_seconds=self.repetition.max_seconds,
            )
            # Weights are float32 and are read once a pass, their gradients written once.
            work = Work(PASSES[name] * flops, 4 * parameters * (1 if name == "forward" else 3))
            yield from timed(name, times, settings, work.floor_ms(subject.ceilings))


def _model(size: Any) -> ModelSettings:
    if not (isinstance(size, list) and len(size) == 5 and all(type(part) is int and part > 0 for part in size[1:])):
        raise UserError(f"bench.sizes: {size} must be [name, width, feed-forward width, layers, heads]")
    name, dim, feed_forward_width, num_layers, num_heads = size
    if dim % num_heads:
        raise UserError(f"bench.sizes: {size}, its {num_heads} heads must divide its width")
    model = ModelSettings(
        name=str(name),
        dim=dim,
        num_layers=num_layers,
        head_width=dim // num_heads,
        feed_forward_width=feed_forward_width,
    )
    check(model, f"bench.sizes: {name}, ")
    return model


def _without(settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    units = {f"{name}{MILLISECONDS}": "ms" for name in PASSES}
    yield from without_numbers(units | {MAX_ERROR: ""}, settings, status, reason)
