import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attnbench.bench.base import MAX_ERROR, Bench, Conditions, error_row
from attnbench.bench.operators.language_models import by_mixer
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import time_row
from attnbench.machine.timing import Times
from attnbench.mixers.base import Mixer
from attnbench.model.building import build_model
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, ModelSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Rates
from attnbench.training.stack import Member, Stack
from attnbench.training.step import Batch, stepper

STEP, SHARE = "step_milliseconds", "training_milliseconds"
UNITS = {STEP: "ms", SHARE: "ms", MAX_ERROR: ""}

LINES = ("sequence_length", "width", "compiled", "stack")
NAMES = ("length", "pairs", "width", "batch_size", "vocabulary_size")


class StacksBench(Bench):
    """Training steps of a probe's small models, alone and in stacks: forward, backward, clipping, update.

    A stack of one is a training alone. Tokens are random. On a GPU all steps are replayed as CUDA graphs, as in
    training.
    """

    tasks: list = option(
        [[32, 4, 32, 64, 64], [64, 4, 64, 256, 8192], [256, 16, 64, 256, 8192], [512, 64, 64, 128, 8192]],
        "[length, pairs, width, sequences a step, symbols]: recall's presets small and zoology",
    )
    stacks: list[int] = option(
        [1, 2, 3, 5, 10, 20], "trainings in a stack; 1 is a training alone", distinct=True, minimum=1
    )
    mixers: list[str] = option(["softmax", "linear", "gated_deltanet"], "names of yamls of attn/", distinct=True)
    num_layers: int = option(2, "of each model, which has one head and no feed-forward", minimum=1)
    compiled: list[bool] = option(
        [False], "true: a training alone through torch.compile, which takes some ten seconds", distinct=True
    )
    repeats, max_seconds = 30, 3

    layouts = tuple(
        Layout(title=title, lines=LINES, values=(Values(metric=metric),))
        for title, metric in (
            ("a training's share of a step, ms", SHARE),
            ("a step of the stack, ms", STEP),
            ("the first step's loss and gradient norm, largest relative error", MAX_ERROR),
        )
    )
    notes = (
        "Trainings of a stack differ in seed and learning rate. A share is the time of the whole step divided by their "
        "number: where it no longer falls, the device is full. Errors are beside the same trainings alone.",
    )
    plots = ((SHARE, "stack"),)
    headline = (Headline(SHARE, "ms a training's step", axes=LINES, label=("stack",)),)
    smoke = {
        **{"tasks": [[16, 2, 16, 4, 32]], "stacks": [1, 2], "mixers": ["softmax", "linear"], "num_layers": 1},
        **{"compiled": [False], "warmup": 1, "repeats": 3},
    }

    def __post_init__(self) -> None:
        for task in self.tasks:
            if not isinstance(task, list) or len(task) != len(NAMES):
                raise UserError(f"bench.tasks: {task} must be [{', '.join(NAMES)}]")
            check_value("bench.tasks", task, kind=list[int], minimum=1)

    @property
    def mixer_names(self) -> Sequence[str]:
        return self.mixers

    def cells(self) -> Iterator[dict[str, Any]]:
        for length, pairs, width, batch_size, vocabulary_size in self.tasks:
            task = {"sequence_length": length, "num_pairs": pairs, "width": width, "batch_size": batch_size}
            for compiled, stack in itertools.product(self.compiled, self.stacks):
                # Stacks are not compiled.
                if stack == 1 or not compiled:
                    yield {**task, "vocabulary_size": vocabulary_size, "compiled": compiled, "stack": stack}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        width = cell["width"]
        shape = {"dim": width, "num_layers": self.num_layers, "head_width": width, "feed_forward_width": 0}
        size = ModelSettings(name=f"recall-{width}", **shape)

        def rows(mixer: MixerSettings, settings: dict[str, Any]) -> Iterator[Measurement]:
            number, backend = settings["stack"], mixer.options["backend"]
            if number > 1 and backend in resolve(mixer.target, Mixer).without_vmap:
                raise UserError(f"backend {backend} has no batching rule and trains one by one")

            def members() -> list[Member]:
                return [_member(mixer, size, settings, seed, conditions) for seed in range(number)]

            yield error_row(_error(members(), members(), conditions), settings)
            step = _step(members(), conditions, settings["compiled"])
            times = self.times(step, conditions.device)
            yield time_row(times, settings, STEP)
            low, median, high = (value / number for value in (times.low_ms, times.median_ms, times.high_ms))
            yield time_row(Times(median, low, high, times.num_repeats), settings, SHARE)

        yield from by_mixer(self.mixers, size, UNITS, cell, conditions, rows)


def _member(
    mixer: MixerSettings, size: ModelSettings, settings: dict[str, Any], seed: int, conditions: Conditions
) -> Member:
    device = conditions.device
    built = build_model(
        [mixer] * size.num_layers, size, vocabulary_size=settings["vocabulary_size"], seed=seed, device=device
    )
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator, device=device)

    batch_size, length, pairs = settings["batch_size"], settings["sequence_length"], settings["num_pairs"]
    batch = Batch(
        random(batch_size, length, below=settings["vocabulary_size"]),
        random(batch_size, pairs, below=settings["vocabulary_size"]),
        torch.ones(batch_size, pairs, device=device),
        random(batch_size, pairs, below=length),
    )
    # The rate is small, so that nothing diverges meanwhile.
    train = TrainSettings(num_steps=10**6, batch_size=batch_size, learning_rate=1e-4 * (1 + seed), compile=False)
    built.train()
    return Member(state=TrainState.fresh(built), batches=lambda _: batch, settings=train, num_steps=10**6, hooks=[])


def _error(stacked: Sequence[Member], alone: Sequence[Member], conditions: Conditions) -> float:
    """Compare the first losses and gradient norms of a stack with those of each training alone."""
    reports = Stack(stacked, conditions.precision).step(stacked) if len(stacked) > 1 else {}
    errors = []
    for one, single in zip(stacked, alone, strict=True):
        step, rates = (
            stepper(single.state, single.settings, conditions.precision),
            Rates(single.state, single.settings, single.num_steps),
        )
        expected = step(single.batches(0), rates.next())
        for ours, theirs in zip(reports.get(one, expected), expected, strict=True):
            errors.append(float((ours - theirs).abs() / theirs.abs()))
    return max(errors)


def _step(members: Sequence[Member], conditions: Conditions, compiled: bool) -> Callable[[], object]:
    captured = conditions.device.type == "cuda"
    if len(members) > 1:
        stack = Stack(members, conditions.precision, captured=captured)
        return lambda: stack.step(members)
    [one] = members
    step = stepper(one.state, one.settings, conditions.precision, compiled=compiled, captured=captured)
    rates, batch = Rates(one.state, one.settings, one.num_steps), one.batches(0)
    return lambda: step(batch, rates.next())
