"""Several trainings as one stack: each is what it is alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import (
    MIXERS,
    MODEL,
    SEQ_LEN,
    TRAIN,
    VOCABULARY,
    assert_equal_numbers,
    mixer_settings,
    numbers_of,
    one_an_operator,
    record,
)
from torch import Tensor

from attnbench.data.batches import Batches
from attnbench.model.building import build_model
from attnbench.settings.errors import Interrupted
from attnbench.training.checkpoint import TrainState, save_step
from attnbench.training.hooks import DivergedError
from attnbench.training.loop import text_batch, train
from attnbench.training.stack import Member, train_stack
from attnbench.training.step import Batch, StepReport

TOKENS = torch.arange(600).remainder(7).mul(3).remainder(9).to(torch.int16)
RUNS = [(0, 1e-3), (1, 1e-3), (0, 5e-4), (2, 3e-4)]
"""Seeds and learning rates, low enough that 20 steps do not make large differences of a rounding."""

QUICK = ("linear", "softmax")
"""Mixers whose long trainings are compared in every run of the tests."""


class Curve:
    """Hook that keeps losses and gradient norms, and ends a training whose loss is not finite."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        if report is None:
            return
        self.losses.append(float(report.loss))
        self.norms.append(float(report.gradient_norm))
        if not math.isfinite(self.losses[-1]):
            raise DivergedError("not finite")


STACKED = [name for name in MIXERS if name != "lstm"]
"""Mixers with a batching rule."""


def member(
    seed: int, rate: float, *, name: str = "softmax", num_steps: int = 12, dtype: Any = None, **changes: Any
) -> Member:
    model = build_model([mixer_settings(name)] * 2, MODEL, vocabulary_size=len(VOCABULARY), seed=seed)
    batches = Batches(TOKENS, SEQ_LEN, TRAIN.batch_size, seed, "cpu")
    return Member(
        state=TrainState.fresh(model.to(dtype)),
        batches=lambda step: text_batch(batches, step, None),
        settings=replace(TRAIN, learning_rate=rate, num_steps=num_steps, **changes),
        num_steps=num_steps,
        hooks=[Curve()],
    )


def alone(one: Member) -> Member:
    """Train as `loop.train` does."""
    try:
        train(one.state, one.batches, one.settings, precision="float32", num_steps=one.num_steps, hooks=one.hooks)
    except DivergedError as error:
        one.error = error
    return one


def curve_of(one: Member) -> Curve:
    [*_, curve] = one.hooks
    assert isinstance(curve, Curve)
    return curve


def weights_of(one: Member) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.state.model.named_parameters()}


AS_PUBLISHED = {"clip_norm": 0.0, "epsilon": 1e-3, "decay_fraction": 1.0, "rate_interval_steps": 3}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) if name in QUICK else pytest.param(name, {}, marks=pytest.mark.slow) for name in STACKED),
        ("softmax", AS_PUBLISHED),
    ],
)
def test_a_stack_is_its_runs_one_by_one_in_float64(name, changes):
    # The last one's rate overflows as soon as its warm-up is over.
    runs = [*RUNS, (3, 1e200)]
    given = {"name": name, "num_steps": 20, "dtype": torch.float64, **changes}
    together = [member(*run, **given) for run in runs]
    ended = list(train_stack(together, precision="float32"))
    assert len(ended) == len(runs)
    *finite, lost = together
    assert lost.error is not None
    assert all(one.error is None and one.state.step == 20 for one in finite)
    for run, one in zip(runs, together, strict=True):
        single = alone(member(*run, **given))
        assert (single.error is None) == (one.error is None)
        assert single.state.step == one.state.step
        for kind in ("losses", "norms"):
            ours, theirs = (torch.tensor(getattr(curve_of(it), kind), dtype=torch.float64) for it in (one, single))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)
        if one.error is None:
            for key, tensor in weights_of(single).items():
                torch.testing.assert_close(weights_of(one)[key], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", one_an_operator(STACKED))
def test_the_first_loss_in_float32_is_that_of_the_run_alone(name):
    together = [member(*run, name=name, num_steps=1) for run in RUNS]
    list(train_stack(together, precision="float32"))
    for run, one in zip(RUNS, together, strict=True):
        assert curve_of(one).losses == pytest.approx(
            curve_of(alone(member(*run, name=name, num_steps=1))).losses, rel=1e-6
        )


@pytest.mark.parametrize("name", one_an_operator(STACKED))
def test_a_run_ends_to_the_bit_as_it_does_beside_any_others(name):
    runs = [*RUNS, (4, 1e-3)]
    ends = []
    # What goes on after a stop may be any part of the stack, its last training alone too.
    for part in ([0, 1, 2, 3, 4], [2], [1, 2], [0, 2, 3, 4]):
        stack = {index: member(*runs[index], name=name, num_steps=5) for index in part}
        list(train_stack([*stack.values()], precision="float32"))
        ends.append(stack[2])
    together, *others = ends
    for one in others:
        assert_equal_numbers(numbers_of(one.state), numbers_of(together.state))
        assert curve_of(one).losses == curve_of(together).losses
        assert curve_of(one).norms == curve_of(together).norms


def test_a_run_that_is_over_stands_still_and_is_given_back_before_the_others_end():
    short, long = member(0, 1e-2, num_steps=3), member(1, 1e-2, num_steps=8)
    ending = train_stack([short, long], precision="float32")
    assert next(ending) is short
    assert long.state.step == 3
    kept = numbers_of(short.state)
    assert list(ending) == [long]
    assert long.state.step == 8
    assert_equal_numbers(numbers_of(short.state), kept)


def test_runs_that_are_over_are_left_out_once_half_of_the_stack_stands_still(monkeypatch):
    sizes = []
    initialise = __import__("attnbench.training.stack", fromlist=["Stack"]).Stack.__init__

    def noted(self: Any, members: Any, *given: Any, **more: Any) -> None:
        sizes.append(len(members))
        initialise(self, members, *given, **more)

    monkeypatch.setattr("attnbench.training.stack.Stack.__init__", noted)
    # Of the hundreds that a recording is worth on a GPU.
    monkeypatch.setattr("attnbench.training.stack.MIN_STEPS_TO_COMPACT", 20)
    many = 20 + 4
    lengths = [2, 3, 4, many]
    given: dict[str, Any] = {"dtype": torch.float64}
    together = [member(seed, 1e-3, num_steps=steps, **given) for seed, steps in enumerate(lengths)]
    list(train_stack(together, precision="float32"))
    # At step 3 half of the four are over, at step 4 half of the two; then one trains on, whose end is near enough.
    assert sizes == [4, 2, 1]
    single = alone(member(3, 1e-3, num_steps=many, **given))
    torch.testing.assert_close(
        torch.tensor(curve_of(together[3]).losses), torch.tensor(curve_of(single).losses), rtol=1e-8, atol=1e-10
    )


class StopsAt:
    """Last hook that keeps the state and stops once it is told to."""

    def __init__(self, folder: Any, told: dict[str, bool], at: int | None = None) -> None:
        self.folder, self.told, self.at = folder, told, at

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        self.told["to stop"] |= state.step == self.at
        if self.told["to stop"]:
            save_step(self.folder, state, record())
            raise Interrupted("stopped", 143)


def test_a_stop_that_cuts_a_look_off_keeps_nothing_of_its_step(tmp_path):
    told = {"to stop": False}

    def cut_off(state: TrainState, report: StepReport) -> None:
        told["to stop"] = True
        raise Interrupted("before anything was kept", 143)

    first, second = member(0, 1e-3), member(1, 1e-3)
    for index, one in enumerate((first, second)):
        one.hooks = [*one.hooks, *([cut_off] if index else []), StopsAt(tmp_path / str(index), told)]
    with pytest.raises(Interrupted, match="before anything was kept"):
        list(train_stack([first, second], precision="float32"))
    assert not list(tmp_path.rglob("*"))


def test_a_run_whose_last_step_the_stop_meets_is_given_back_before_it(tmp_path):
    told = {"to stop": False}
    short, long = member(0, 1e-3, num_steps=5), member(1, 1e-3)
    long.hooks = [*long.hooks, StopsAt(tmp_path, told, 5)]
    ending = train_stack([short, long], precision="float32")
    assert next(ending) is short
    with pytest.raises(Interrupted):
        next(ending)


def test_members_whose_batches_end_at_different_positions_train_as_alone():
    """A stack fills the shorter ones up behind their last labels, which are stored as truth values."""

    def trimmed(seed):
        one = member(seed, 1e-3, num_steps=6, dtype=torch.float64, name="linear")
        batches = one.batches

        def batch(step):
            tokens_BT, targets_BT, *_ = batches(step)
            length = 3 + (step + seed) % 4
            weight_BT = torch.ones(len(tokens_BT), length, dtype=torch.bool)
            weight_BT[0, -1] = False
            return Batch(tokens_BT[:, :length].to(torch.int8), targets_BT[:, :length].to(torch.int8), weight_BT)

        one.batches = batch
        return one

    together = [trimmed(seed) for seed in range(3)]
    list(train_stack(together, precision="float32"))
    for seed, one in enumerate(together):
        single = alone(trimmed(seed))
        for kind in ("losses", "norms"):
            ours, theirs = (torch.tensor(getattr(curve_of(it), kind), dtype=torch.float64) for it in (one, single))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
