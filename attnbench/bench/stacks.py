"""Training steps of a probe's small models, alone and in stacks: up to which size another training costs less."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from attnbench.bench.base import MAX_ERROR, Conditions, Missing, TimedBench, attempted, error_row, rows_or_reason
from attnbench.bench.operators.language_models import resolved
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.machine.timing import Times, time_repeats
from attnbench.mixers.base import Mixer
from attnbench.model.building import build_model
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, ModelSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Rates
from attnbench.training.stack import Member, Stack
from attnbench.training.step import Batch, stepper

STEP, SHARE = "step_milliseconds", "training_milliseconds"
UNITS = {STEP: "ms", SHARE: "ms", MAX_ERROR: ""}

NAMES = ("length", "pairs", "width", "batch_size", "vocabulary_size")


@dataclass(kw_only=True)
class StacksBench(TimedBench):
    """Times the training step of stacks of recall's models on random tokens: forward, backward, clipping, update.

    A stack of one is a training alone, as every probe's is where no stack is asked for. On a GPU all steps are replayed
    as CUDA graphs, as in training.

    Args:
        tasks: [length, pairs, width, sequences a step, symbols] each; logits are read at as many positions as pairs.
        stacks: trainings in a stack.
        mixers: names of yamls of attn/.
        num_layers: of each model, which has one head and no feed-forward.
        compiled: a training alone as it is, or through torch.compile, or both.

    Raises:
        UserError: a count that is none, or no task, stack or mixer.
    """

    tasks: list
    stacks: list[int]
    mixers: list
    num_layers: int
    compiled: list[bool]

    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            title="a training's share of a step, ms",
            lines=("sequence_length", "width", "compiled", "stack"),
            values=(Values(metric=SHARE),),
        ),
        Layout(
            title="a step of the stack, ms",
            lines=("sequence_length", "width", "compiled", "stack"),
            values=(Values(metric=STEP),),
        ),
        Layout(
            title="the first step's loss and gradient norm, largest relative error",
            lines=("sequence_length", "width", "compiled", "stack"),
            values=(Values(metric=MAX_ERROR),),
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Trainings of a stack differ in seed and learning rate. A share is the time of the whole step divided by their "
        "number: where it no longer falls, the device is full. Errors are beside the same trainings alone.",
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = ((SHARE, "stack"),)
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline(
            SHARE, "ms a training's step", axes=("sequence_length", "width", "compiled", "stack"), label=("stack",)
        ),
    )
    smoke: ClassVar[dict[str, Any]] = {
        **{
            "tasks": [[16, 2, 16, 4, 32]],
            "stacks": [1, 2],
            "mixers": ["softmax", "linear"],
            "num_layers": 1,
            "compiled": [False],
        },
        **{"warmup": 1, "repeats": 3},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tasks", "stacks", "mixers", "compiled"):
            if not getattr(self, name):
                raise UserError(f"bench.{name}=[]: must name at least one")
        for task in self.tasks:
            if not isinstance(task, list) or len(task) != len(NAMES):
                raise UserError(f"bench.tasks: {task} must be [{', '.join(NAMES)}]")
            check_counts("bench", tasks=task)

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
            number = settings["stack"]
            if number > 1 and mixer.options["backend"] in resolve(mixer.target, Mixer).without_vmap:
                raise UserError(f"backend {mixer.options['backend']} has no batching rule and trains one by one")

            def members() -> list[Member]:
                return [_member(mixer, size, settings, seed, conditions) for seed in range(number)]

            yield error_row(_error(members(), members(), conditions), settings)
            step = _step(members(), conditions, settings["compiled"])
            times = time_repeats(step, conditions.device, **asdict(self.repetition))
            yield time_row(times, settings, STEP)
            low, median, high = (value / number for value in (times.low_ms, times.median_ms, times.high_ms))
            yield time_row(Times(median, low, high, times.num_repeats), settings, SHARE)

        return measure


def _member(
    mixer: MixerSettings, size: ModelSettings, settings: dict[str, Any], seed: int, conditions: Conditions
) -> Member:
    """Build a training with its own weights, tokens and learning rate."""
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
    # A step makes no difference to the time of the next: the rate is small, so that nothing diverges meanwhile.
    train = TrainSettings(num_steps=10**6, batch_size=batch_size, learning_rate=1e-4 * (1 + seed), compile=False)
    built.train()
    return Member(state=TrainState.fresh(built), batches=lambda _: batch, settings=train, num_steps=10**6, hooks=[])


def _error(stacked: Sequence[Member], alone: Sequence[Member], conditions: Conditions) -> float:
    """Compare the first losses and gradient norms of a stack with those of each alone, relative to the latter."""
    reports = Stack(stacked, conditions.precision).step(stacked) if len(stacked) > 1 else {}
    errors = []
    for one, single in zip(stacked, alone, strict=True):
        step, rates = stepper(single.state, single.settings, conditions.precision), _rates(single)
        expected = step(single.batches(0), rates.next())
        for ours, theirs in zip(reports.get(one, expected), expected, strict=True):
            errors.append(float((ours - theirs).abs() / theirs.abs()))
    return max(errors)


def _rates(one: Member) -> Rates:
    return Rates(one.state, one.settings, one.num_steps)


def _step(members: Sequence[Member], conditions: Conditions, compiled: bool) -> Callable[[], object]:
    """Return the step that trains them: of one alone that of `loop.train`."""
    captured = conditions.device.type == "cuda"
    if len(members) > 1:
        stack = Stack(members, conditions.precision, captured=captured)
        return lambda: stack.step(members)
    [one] = members
    step = stepper(one.state, one.settings, conditions.precision, compiled=compiled, captured=captured)
    rates, batch = _rates(one), one.batches(0)
    return lambda: step(batch, rates.next())
