"""Training steps against torch's own optimizer, the schedule, precision, and what happens when numbers are lost."""

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small import (
    MIXERS,
    MODEL,
    PROFILED,
    SEQ_LEN,
    TRAIN,
    VOCABULARY,
    assert_equal_numbers,
    batch_of,
    fresh_state,
    mixer_settings,
    numbers_of,
    one_an_operator,
    watch_compiler,
)
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._functorch._aot_autograd.autograd_cache import check_cacheable

import attnbench.training.loop
from attnbench.data.texts import find_embedded
from attnbench.machine.device import resolve_device, wake_compiler
from attnbench.machine.environment import _assembler_version
from attnbench.machine.precision import computing
from attnbench.machine.signals import StopRequest
from attnbench.model.building import build_model
from attnbench.results.folder import data_root
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_STEPS
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError, Sitting, Stopwatch
from attnbench.training.job import Run
from attnbench.training.learning_rate import learning_rates, num_decay_steps, shortened
from attnbench.training.log import MetricsLog, ProgressBar
from attnbench.training.loop import Hook, train
from attnbench.training.step import (
    Batch,
    StepReport,
    batch_nats,
    clip,
    compiled_nats,
    loss_and_gradients,
    stepper,
    train_step,
    update,
)

CPU = torch.device("cpu")


class Losses:
    """A hook that keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, state: TrainState, report: StepReport) -> None:
        self.values.append(float(report.loss))


def losses_of_training(
    state: TrainState, num_steps: int, precision: str = "float32", batches: Callable[[int], Batch] = batch_of
) -> list[float]:
    losses = Losses()
    train(state, batches, TRAIN, precision=precision, num_steps=num_steps, hooks=[losses])
    return losses.values


def unequal_batch() -> Batch:
    """Four sequences, scored at three positions each, of which they have 3, 0, 1 and 2 labels."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(len(VOCABULARY), (4, SEQ_LEN), generator=generator)
    targets_BL = torch.randint(len(VOCABULARY), (4, 3), generator=generator)
    positions_BL = torch.tensor([[1, 7, 15], [0, 2, 3], [4, 5, 6], [0, 14, 9]])
    weight_BL = torch.tensor([[1.0, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]])
    return Batch(tokens_BT, targets_BL, weight_BL, positions_BL)


# The norms of these steps lie on both sides of 1.3.
@pytest.mark.parametrize(
    ("name", "clip_norm", "epsilon"), [("softmax", 1.3, None), ("gated_deltanet", 1.3, None), ("softmax", 0.0, 1e-3)]
)
def test_the_update_is_that_of_torchs_adamw_after_its_clipping(name, clip_norm, epsilon):
    settings = replace(TRAIN, weight_decay=0.3, beta1=0.8, beta2=0.9, clip_norm=clip_norm, epsilon=epsilon)
    state = fresh_state(name)
    model = copy.deepcopy(state.model)
    spared = model.undecayed()
    named = dict(model.named_parameters())
    assert spared < named.keys()
    assert name == "softmax" or any(key.endswith("log_decay_rate") for key in spared)
    groups = [
        {"params": [tensor for key, tensor in named.items() if key not in spared], "weight_decay": 0.3},
        {"params": [tensor for key, tensor in named.items() if key in spared], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=epsilon or 1e-8, foreach=False, fused=False)
    norms = []
    for step, rate in enumerate([1e-3, 1e-2, 3e-2, 2e-2, 1e-2, 1e-3]):
        batch = batch_of(step)
        report = train_step(state, batch, torch.tensor(rate), settings, "float32")

        logits_BTC, _ = model(batch.tokens_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTC.flatten(0, 1), batch.targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        torch.testing.assert_close(report.loss, loss.detach(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(report.gradient_norm, norm, atol=1e-6, rtol=1e-4)
        norms.append(float(norm))
    assert min(norms) < 1.3 < max(norms), norms
    for key, tensor in state.model.named_parameters():
        torch.testing.assert_close(tensor, named[key], atol=2e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
        moments = optimizer.state[named[key]]
        torch.testing.assert_close(state.first_moment[key], moments["exp_avg"], atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(state.second_moment[key], moments["exp_avg_sq"], atol=1e-7, rtol=1e-3)
        assert state.update_count[key] == 6


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_unequal", [False, True])
def test_micro_batches_change_neither_loss_nor_gradients_nor_update(size, is_unequal):
    batch = unequal_batch() if is_unequal else batch_of(0)
    whole, parts = fresh_state(), fresh_state()
    loss, gradients = loss_and_gradients(whole.model, batch, None, "float32")
    loss_of_parts, gradients_of_parts = loss_and_gradients(parts.model, batch, size, "float32")
    torch.testing.assert_close(loss_of_parts, loss)
    assert gradients_of_parts.keys() == gradients.keys() == dict(whole.model.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_of_parts[name], gradient, atol=1e-6, rtol=1e-4)
    assert all(tensor.grad is None for tensor in parts.model.parameters())

    rate = torch.tensor(1e-2)
    train_step(whole, batch, rate, TRAIN, "float32")
    train_step(parts, batch, rate, replace(TRAIN, micro_batch_size=size), "float32")
    for name, tensor in whole.model.named_parameters():
        # Adam divides by the gradient's own size, so that rounding shows where a gradient is next to nothing.
        small = gradients[name].abs() < 1e-5
        other = dict(parts.model.named_parameters())[name]
        torch.testing.assert_close(other[~small], tensor[~small], atol=1e-4, rtol=1e-3)


def test_the_loss_is_the_mean_over_the_labels_that_there_are():
    batch = unequal_batch()
    state = fresh_state()
    loss, _ = loss_and_gradients(state.model, batch, 1, "float32")
    logits_BTC, _ = state.model(batch.tokens_BT)
    log_p_BTC = logits_BTC.detach().log_softmax(-1)
    assert batch.positions_BL is not None
    nats = []
    for row, column in [(0, 0), (0, 1), (0, 2), (2, 1), (3, 0), (3, 2)]:
        position, target = batch.positions_BL[row, column], batch.targets_BT[row, column]
        nats.append(-log_p_BTC[row, position, target])
    torch.testing.assert_close(loss, torch.stack(nats).mean())


def test_the_rate_warms_up_and_ends_at_its_fraction():
    settings = replace(TRAIN, learning_rate=0.5, warmup_steps=4, final_rate_fraction=0.2)
    rates = learning_rates(settings, 11)
    assert rates.shape == (11,)
    torch.testing.assert_close(rates[:4], torch.tensor([0.125, 0.25, 0.375, 0.5]))
    # Seven steps of cosine from the peak to the floor, with the middle halfway.
    torch.testing.assert_close(rates[4], torch.tensor(0.5))
    torch.testing.assert_close(rates[7], torch.tensor(0.3))
    torch.testing.assert_close(rates[10], torch.tensor(0.1))
    assert (rates[4:].diff() < 0).all()


def test_a_constant_rate_falls_in_a_line_at_the_end_which_a_stop_brings_nearer():
    settings = replace(TRAIN, learning_rate=0.5, warmup_steps=50, final_rate_fraction=0.2, decay_fraction=0.2)
    budget = learning_rates(settings, 2000)
    assert (budget[49:1600] == 0.5).all()
    torch.testing.assert_close(budget[1600:], torch.linspace(0.5, 0.1, 401)[1:])
    # A fifth of the steps that are made then, at least 100, and never past the budget.
    for step, end, fall in ((20, 150, 100), (300, 400, 100), (800, 1000, 200), (1600, 2000, 400), (1900, 2000, 400)):
        assert shortened(settings, 2000, step) == end
        assert num_decay_steps(settings, end) == fall
        torch.testing.assert_close(
            learning_rates(settings, end)[: min(step, end - fall)], budget[: min(step, end - fall)]
        )
    # Of a short training the warm-up stays whole.
    assert num_decay_steps(settings, 120) == 70
    assert num_decay_steps(settings, 30) == 0


def test_a_rate_stays_or_falls_in_a_line_and_moves_at_intervals():
    settings = replace(TRAIN, learning_rate=0.5, warmup_steps=2, final_rate_fraction=0.0)
    stays = learning_rates(replace(settings, decay_fraction=0.0), 102)
    falls = learning_rates(replace(settings, decay_fraction=1.0), 102)
    assert stays.tolist() == [0.25] + [0.5] * 101
    torch.testing.assert_close(falls[2:], torch.linspace(0.5, 0.0, 101)[1:])
    cosine = learning_rates(settings, 102)
    by_epoch = learning_rates(replace(settings, rate_interval_steps=20), 102)
    assert by_epoch.tolist() == [float(cosine[step - step % 20]) for step in range(102)]


def test_a_language_model_s_patience_ends_its_constant_rate():
    settings = replace(TRAIN, warmup_steps=50, decay_fraction=0.2, patience_validations=2)
    run: Any = SimpleNamespace(train=settings, num_steps=2000, validation_interval=200)
    state = fresh_state()
    state.best_step = 400

    def end(state: TrainState) -> int | None:
        return Run.new_end(run, state, {})

    ends = {}
    for state.step in (600, 800):
        ends[state.step] = end(state)
    assert ends == {600: None, 800: 1000}
    run.train = replace(settings, patience_validations=None)
    assert end(state) is None


def test_the_loop_follows_an_end_that_a_hook_brings_nearer():
    settings = replace(TRAIN, num_steps=12, warmup_steps=1, decay_fraction=0.5)
    rates: list[float] = []

    def step(batch: Batch, rate: torch.Tensor) -> StepReport:
        rates.append(float(rate))
        return StepReport(torch.tensor(0.0), torch.tensor(0.0))

    def end(state: TrainState, report: StepReport) -> None:
        if state.step == 4:
            state.last_step = 6

    state = fresh_state()
    with patch.object(attnbench.training.loop, "stepper", lambda *_, **__: step):
        train(state, batch_of, settings, precision="float32", num_steps=300, hooks=[end])
    assert state.step == 6
    torch.testing.assert_close(torch.tensor(rates[:4]), learning_rates(settings, 300)[:4])
    torch.testing.assert_close(torch.tensor(rates[4:]), learning_rates(settings, 6)[4:])


def test_the_rates_of_a_long_training_are_made_a_piece_at_a_time(monkeypatch):
    def end(state, report):
        if state.step == 3:
            raise StopIteration

    with pytest.raises(StopIteration):
        train(fresh_state(), batch_of, TRAIN, precision="float32", num_steps=MAX_STEPS, hooks=[end])
    torch.testing.assert_close(learning_rates(TRAIN, 12, range(5, 9)), learning_rates(TRAIN, 12)[5:9])
    whole, in_pieces = fresh_state(), fresh_state()
    for state, at_a_time in ((whole, 2**12), (in_pieces, 5)):
        monkeypatch.setattr(attnbench.training.loop, "RATES_AT_A_TIME", at_a_time)
        train(state, batch_of, TRAIN, precision="float32", num_steps=12, hooks=[])
    assert_equal_numbers(numbers_of(in_pieces), numbers_of(whole))


@pytest.mark.parametrize(
    ("warmup_steps", "num_steps", "expected"),
    [
        (0, 1, [0.5]),
        (1, 1, [0.5]),
        (100, 1, [0.5]),
        (100, 4, [0.125, 0.25, 0.375, 0.5]),
        (4, 4, [0.125, 0.25, 0.375, 0.5]),
        (3, 4, [0.5 / 3, 1 / 3, 0.5, 0.5]),
        (0, 2, [0.5, 0.1]),
    ],
)
def test_the_rate_of_a_run_as_short_as_its_warm_up(warmup_steps, num_steps, expected):
    settings = replace(TRAIN, learning_rate=0.5, warmup_steps=warmup_steps, final_rate_fraction=0.2)
    torch.testing.assert_close(learning_rates(settings, num_steps), torch.tensor(expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_leave_everything_untouched(value):
    state = fresh_state("gated_deltanet")
    rate = torch.tensor(1e-2)
    train_step(state, batch_of(0), rate, TRAIN, "float32")
    before = numbers_of(state)
    _, gradients = loss_and_gradients(state.model, batch_of(1), None, "float32")
    gradients["embedding.weight"][2, 3] = value
    norm = clip(gradients, TRAIN.clip_norm)
    update(state, gradients, norm, rate, TRAIN)
    assert_equal_numbers(numbers_of(state), before)
    # The next finite step goes on as if this one had not been.
    twin = fresh_state("gated_deltanet")
    for number in (0, 2):
        train_step(twin, batch_of(number), rate, TRAIN, "float32")
    train_step(state, batch_of(2), rate, TRAIN, "float32")
    assert_equal_numbers(numbers_of(state), numbers_of(twin))


def logging_hook(state: TrainState, folder: Path, num_steps: int, interval: int) -> Hook:
    train = replace(TRAIN, log_interval_steps=interval)
    job = SimpleNamespace(train=train, num_steps=num_steps, tokens_per_step=TRAIN.batch_size * SEQ_LEN)
    log, bar = MetricsLog(folder / "metrics.jsonl", resume_step=None), ProgressBar(num_steps, 1, 0, "small")
    shared: Any = {"job": job, "mirror": None, "stop": StopRequest()}
    return Sitting(log=log, bar=bar, stopwatch=Stopwatch(state, CPU), **shared).write_log


@pytest.mark.parametrize(("bad_step", "found_at"), [(1, 4), (3, 4), (4, 6)])
def test_a_lost_update_is_found_at_the_next_logged_step(bad_step, found_at, tmp_path):
    def batches(step: int) -> Batch:
        batch = batch_of(step)
        # A weight that is not finite makes the gradients so, for this one step; the loss after it looks well again.
        return batch._replace(weight_BT=torch.full((4, SEQ_LEN), math.nan if step == bad_step else 1.0))

    state = fresh_state()
    hook = logging_hook(state, tmp_path, num_steps=6, interval=4)
    with pytest.raises(DivergedError, match=rf"diverged by step {found_at}: .* 1 updates skipped .*learning_rate"):
        train(state, batches, TRAIN, precision="float32", num_steps=6, hooks=[hook])
    assert state.step == found_at
    assert all(torch.isfinite(tensor).all() for tensor in state.model.parameters())


def test_of_a_training_without_an_update_no_rate_is_blamed(tmp_path):
    def batches(step: int) -> Batch:
        return batch_of(step)._replace(weight_BT=torch.full((4, SEQ_LEN), math.nan))

    state = fresh_state()
    with pytest.raises(DivergedError, match=r"4 updates skipped for gradients that were not finite$"):
        train(state, batches, TRAIN, precision="float32", num_steps=4, hooks=[logging_hook(state, tmp_path, 4, 4)])


def test_a_weight_that_never_has_a_gradient_is_no_lost_update(tmp_path):
    state = fresh_state()
    model = state.model
    model.spare = torch.nn.Parameter(torch.ones(3))
    state = TrainState.fresh(model)
    train(state, batch_of, TRAIN, precision="float32", num_steps=4, hooks=[logging_hook(state, tmp_path, 4, 2)])
    assert state.num_updates() == 4
    assert model.spare.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", one_an_operator())
def test_training_lowers_the_loss(name):
    losses = losses_of_training(fresh_state(name), 30)
    assert losses[0] == pytest.approx(math.log(len(VOCABULARY)), abs=0.3)
    assert losses[-1] < 0.6 * losses[0]


# In others a rounding grows within these few steps; the contract holds each of their passes in bfloat16.
@pytest.mark.parametrize("name", PROFILED)
def test_training_in_bfloat16_follows_float32_without_being_it(name):
    exact = losses_of_training(fresh_state(name), 12)
    rounded = losses_of_training(fresh_state(name), 12, precision="bfloat16")
    assert rounded != exact
    # The loss falls by half in these steps, and one of them more or less is a tenth.
    assert rounded == pytest.approx(exact, rel=0.1)


def test_bfloat16_keeps_weights_gradients_and_moments_in_float32():
    state = fresh_state()
    _, gradients = loss_and_gradients(state.model, batch_of(0), 2, "bfloat16")
    train_step(state, batch_of(0), torch.tensor(1e-2), TRAIN, "bfloat16")
    tensors = [*gradients.values(), *numbers_of(state).values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(("precision", "inside"), [("float32", "highest"), ("tf32", "high"), ("bfloat16", "highest")])
def test_the_precision_of_products_is_given_back(before, precision, inside):
    of_the_process = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with suppress(UserError), computing(precision, CPU):
            assert torch.get_float32_matmul_precision() == inside
            assert torch.is_autocast_enabled("cpu") == (precision == "bfloat16")
            raise UserError("in the middle")
        assert torch.get_float32_matmul_precision() == before
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(of_the_process)


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_our_kernels_are_kept_where_the_compiler_keeps_its_own(folder, tmp_path, monkeypatch):
    """Where torch's compiler looks, whether the variable is set in a process or, in one where all was found, never."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
    if not folder:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    resolve_device("cpu")
    named = os.environ["TRITON_CACHE_DIR"]
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert named == triton_cache_dir(0)


def test_a_folder_of_kernels_that_the_user_has_named_stays(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    resolve_device("cpu")
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/user"


def test_every_kernel_is_made_by_tritons_own_assembler(monkeypatch):
    """Whatever torch's compiler would name later."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    # Set, so that what is done to it here is undone.
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    resolve_device("cpu")
    own = os.environ["TRITON_PTXAS_PATH"]
    _set_triton_ptxas_path()
    assert own == os.environ["TRITON_PTXAS_PATH"]
    assert Path(own).parts[-5:] == ("triton", "backends", "nvidia", "bin", "ptxas")
    assert re.fullmatch(r"\d+\.\d+\.\d+", _assembler_version() or "")

    monkeypatch.setenv("TRITON_PTXAS_PATH", "/of/the/user")
    resolve_device("cpu")
    assert os.environ["TRITON_PTXAS_PATH"] == "/of/the/user"
    assert _assembler_version() is None


def test_what_the_compiler_waits_for_begins_before_it_has_traced_anything(monkeypatch):
    from torch._inductor import async_compile, codecache

    events = []
    monkeypatch.setattr("attnbench.machine.device.Thread", lambda target, daemon: SimpleNamespace(start=target))
    monkeypatch.setattr(codecache, "torch_key", lambda: events.append("hashed"))
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", lambda: events.append("started"))
    # Not as it was called before: it does this once in a process.
    wake = wake_compiler.__wrapped__
    wake(torch.device("cpu"))
    assert events == ["hashed"]
    wake(torch.device("cuda", 0))
    assert events == ["hashed", "hashed", "started"]

    events.clear()
    monkeypatch.setattr("attnbench.training.step.wake_compiler", lambda device: events.append(device.type))
    monkeypatch.setattr("attnbench.ops.common.importing.import_module", events.append)
    monkeypatch.setattr(torch, "compile", lambda *arguments, **options: events.append("compile"))
    stepper(fresh_state(), TRAIN, "float32", compiled=True)
    assert events == ["cpu", *["compile"] * 3]

    events.clear()
    weight = SimpleNamespace(device=torch.device("cuda"))
    on_gpu: Any = SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter([weight])))
    stepper(on_gpu, TRAIN, "float32", compiled=True)
    assert (events[0], events[-1]) == ("cuda", "compile")
    assert {"attnbench.ops.delta.triton.delta_op", "attnbench.ops.layers.triton.embedding"} < set(events)


@pytest.mark.parametrize(("precision", "products"), [("float32", "highest"), ("tf32", "high")])
def test_a_backward_pass_has_the_products_of_its_forward_pass(precision, products):
    seen = []

    class Recording(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_float32_matmul_precision())
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(torch.get_float32_matmul_precision())
            assert not torch.is_autocast_enabled("cpu")
            return gradient.expand(10, 32)

    def nats(model, batch):
        return Recording.apply(model.embedding.weight)

    state = fresh_state()
    loss_and_gradients(state.model, batch_of(0), None, precision, nats)
    assert seen == [products, products]


@pytest.mark.parametrize(
    "name", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "gated_deltanet"))]
)
def test_a_compiled_step_trains_to_the_same_losses(name, monkeypatch):
    # Two chunks: at one, torch's fake kernel of softplus's gradient has other strides than its real one, and
    # aot_eager, which alone calls the real one, falls over it.
    length = 80
    tokens_BT = (torch.arange(2 * (length + 1)).reshape(2, -1) * 3) % len(VOCABULARY)

    def batches(step: int) -> Batch:
        shifted_BT = (tokens_BT + step) % len(VOCABULARY)
        return Batch(shifted_BT[:, :-1], shifted_BT[:, 1:])

    eager = losses_of_training(fresh_state(name), 3, batches=batches)
    state, graphs = fresh_state(name), watch_compiler(monkeypatch)
    losses = Losses()
    train(state, batches, TRAIN, precision="float32", num_steps=3, hooks=[losses], compiled=True)
    assert losses.values == pytest.approx(eager, abs=1e-4)
    # One for both blocks, one before and one behind them: nothing that changes with layer or step is built into them.
    assert len(graphs) == 3


def test_blocks_of_one_kind_are_compiled_once(monkeypatch):
    kinds = [mixer_settings("window"), mixer_settings("linear")] * 2
    model = build_model(kinds, replace(MODEL, num_layers=4), vocabulary_size=len(VOCABULARY), seed=0)
    graphs, batch = watch_compiler(monkeypatch, run=lambda graph, inputs: graph.forward), batch_of(0)
    loss = compiled_nats(torch.device("cpu"))(model, batch)
    assert len(graphs) == 4
    torch.testing.assert_close(loss, batch_nats(model, batch))


def test_models_are_compiled_up_to_the_compiler_s_last_limit_and_past_it_a_step_fails(monkeypatch):
    # Without fullgraph=True, which has it fail anyway.
    graphs, batch = watch_compiler(monkeypatch, run=lambda graph, inputs: graph.forward, fullgraph=False), batch_of(0)
    # The second model is past the first limit. What compiled_nats sets is afterwards as it was.
    with torch._dynamo.config.patch(
        accumulated_recompile_limit=2, recompile_limit=1, fail_on_recompile_limit_hit=False
    ):
        for width in (16, 32, 48):
            size = replace(MODEL, dim=width, head_width=16, num_layers=1)
            model = build_model([mixer_settings("linear")], size, vocabulary_size=len(VOCABULARY), seed=0)
            with pytest.raises(FailOnRecompileLimitHit) if width == 48 else nullcontext():
                compiled_nats(torch.device("cpu"))(model, batch)
    assert len(graphs) == 6


COMPILED = [name for name in MIXERS if name != "lstm"]
"""Mixers in a compiled graph: torch's LSTM runs outside of it."""


@pytest.mark.parametrize(
    "name", [name if name in ("linear", "softmax") else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED]
)
def test_what_was_traced_can_be_kept_for_the_next_process(name, monkeypatch):
    """A single operator that torch cannot keep has every process trace the whole step anew, for seconds."""

    def run(graph, inputs):
        check_cacheable(graph)
        return graph.forward

    state, checked = fresh_state(name), watch_compiler(monkeypatch, run)
    train(state, batch_of, TRAIN, precision="float32", num_steps=1, hooks=[], compiled=True)
    # The bound of HGRN2's decay is another number in each layer, and its blocks two kinds.
    assert len(checked) == (4 if name == "hgrn2" else 3)


@pytest.mark.slow
def test_what_is_before_a_first_step_imports_neither_pandas_nor_sympy():
    """Each takes a quarter of a second, and pyarrow and torch import them on the way to a number and a tensor."""
    program = """if True:
        import sys, traceback
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name in ("pandas", "sympy", "scipy", "matplotlib"):
                    traceback.print_stack(file=sys.stdout)
        sys.meta_path.insert(0, Finder())
        from attnbench import compose, prepare
        prepare(compose(["model=tiny", "data=embedded", "device=cpu"])).new_model()"""
    # Once on a machine the embedded text is written, by pyarrow from a list, on which way pandas is imported too.
    find_embedded(data_root(), 0.1, 0.1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert not done.stdout, done.stdout
