"""Dropout: masks that depend on nothing but seed, step, row, layer, branch and index."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from small import (
    MODEL,
    SEQ_LEN,
    TRAIN,
    VOCABULARY,
    assert_equal_numbers,
    mixer_settings,
    numbers_of,
    record,
    watch_compiler,
)
from torch import Tensor

from attnbench.cli.compose import compose
from attnbench.data.batches import Batches
from attnbench.data.counters import hashed
from attnbench.model.building import build_model
from attnbench.model.dropout import drop, layer_keys, row_keys
from attnbench.model.language_model import LanguageModel
from attnbench.training.checkpoint import TrainState, load_last, save_step
from attnbench.training.loop import text_batch, train
from attnbench.training.prepare import prepare
from attnbench.training.stack import Member, train_stack
from attnbench.training.step import Batch, batch_nats, compiled_nats, loss_and_gradients

SHARE = 0.3
TOKENS = torch.arange(600).remainder(7).mul(3).remainder(9).to(torch.int16)


def dropping(share: float = SHARE, seed: int = 0, name: str = "softmax") -> LanguageModel:
    size = replace(MODEL, dropout=share)
    return build_model([mixer_settings(name)] * 2, size, vocabulary_size=len(VOCABULARY), seed=seed)


def batch_at(step: int, seed: int = 0, **ranks: Any) -> Batch:
    return text_batch(Batches(TOKENS, SEQ_LEN, TRAIN.batch_size, seed, "cpu", **ranks), step, SHARE)


def mask(seed: int, step: int, row: int, layer: int, branch: int) -> Tensor:
    keys = layer_keys(row_keys(seed, step, torch.tensor([row])), layer)
    return drop(torch.ones(1, SEQ_LEN, 32), SHARE, keys, branch) > 0


def test_the_mean_is_kept_and_the_share_is_what_was_asked_for():
    dropped = drop(torch.ones(64, 64, 64), SHARE, layer_keys(row_keys(0, 0, torch.arange(64)), 0), 0)
    # Five standard errors of 2^18 draws.
    assert (dropped == 0).double().mean().item() == pytest.approx(SHARE, abs=5 * (0.3 * 0.7 / 2**18) ** 0.5)
    assert dropped.mean().item() == pytest.approx(1, abs=5 * (0.3 / 0.7 / 2**18) ** 0.5)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_each_counter_makes_another_mask_and_none_of_them_the_same_twice():
    counters: list[dict[str, Any]] = [dict.fromkeys(("seed", "step", "row", "layer", "branch"), 1)]
    counters += [counters[0] | {name: 2} for name in counters[0]]
    masks = [mask(**given) for given in counters]
    assert all(torch.equal(mask(**given), first) for given, first in zip(counters, masks, strict=True))
    for index, first in enumerate(masks):
        for second in masks[index + 1 :]:
            # Independent masks agree in 0.3² + 0.7² of 512 elements.
            assert (first == second).double().mean().item() == pytest.approx(0.58, abs=0.11)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_and_ranks_drop_what_the_whole_batch_drops(size):
    model, batch = dropping(), batch_at(3)
    loss, gradients = loss_and_gradients(model, batch, None, "float32")
    loss_of_parts, gradients_of_parts = loss_and_gradients(model, batch, size, "float32")
    torch.testing.assert_close(loss_of_parts, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_of_parts[name], gradient, atol=1e-6, rtol=1e-4)
    of_ranks = [batch_at(3, rank=rank, num_ranks=2).dropout_B for rank in range(2)]
    assert batch.dropout_B is not None
    for rank, keys in enumerate(of_ranks):
        assert keys is not None
        assert torch.equal(keys, batch.dropout_B[rank::2])


def test_a_resumed_training_is_the_one_that_was_never_stopped(tmp_path):
    never_stopped, stopped = (TrainState.fresh(dropping()) for _ in range(2))
    given = {"precision": "float32", "hooks": []}
    train(never_stopped, batch_at, TRAIN, num_steps=6, **given)
    train(stopped, batch_at, TRAIN, num_steps=6, precision="float32", hooks=[_StopAt(3)])
    save_step(tmp_path, stopped, replace(record(), model=replace(MODEL, dropout=SHARE)))
    # Draws of torch's generator in between change nothing.
    torch.rand(7)
    resumed = load_last(tmp_path, dropping(seed=9))
    assert resumed is not None
    assert resumed.step == 3
    resumed.last_step = None
    train(resumed, batch_at, TRAIN, num_steps=6, **given)
    assert_equal_numbers(numbers_of(resumed), numbers_of(never_stopped))


class _StopAt:
    """A hook that ends a training whose rate goes on as if it did not."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, state: TrainState, report: object) -> None:
        if state.step == self.step:
            state.last_step = self.step


@pytest.mark.parametrize("name", ["softmax", "linear", "gated_deltanet"])
def test_a_stack_of_runs_drops_what_each_drops_alone(name):
    def begun() -> list[Member]:
        how = {"settings": TRAIN, "num_steps": 4, "hooks": []}
        models = [dropping(seed=seed, name=name).double() for seed in range(3)]
        return [
            Member(state=TrainState.fresh(model), batches=partial(batch_at, seed=seed), **how)
            for seed, model in enumerate(models)
        ]

    together = list(train_stack(begun(), precision="float32"))
    for one, alone in zip(together, begun(), strict=True):
        train(alone.state, alone.batches, TRAIN, precision="float32", num_steps=4, hooks=[])
        torch.testing.assert_close([*one.state.model.parameters()], [*alone.state.model.parameters()])


def test_only_a_training_step_drops_and_one_without_keys_is_refused():
    dropped, plain, batch = dropping(), dropping(share=0.0), batch_at(0)
    for mode in (True, False):
        dropped.train(mode)
        assert torch.equal(dropped(batch.tokens_BT)[0], plain(batch.tokens_BT)[0])
    assert dropped.forward_flops(16) == plain.forward_flops(16)
    with pytest.raises(ValueError, match=r"dropout=0.3: the batch has no keys"):
        loss_and_gradients(dropped, Batch(batch.tokens_BT, batch.targets_BT), None, "float32")
    with_keys = loss_and_gradients(plain, batch, None, "float32")[0]
    without = loss_and_gradients(plain, Batch(*batch[:2]), None, "float32")[0]
    assert torch.equal(with_keys, without)


def test_every_branch_of_every_layer_and_the_embedding_are_dropped_from(monkeypatch):
    seen, batch = [], batch_at(0)
    assert batch.dropout_B is not None
    layer_by_key = {tuple(map(int, hashed(batch.dropout_B, layer))): layer for layer in range(3)}

    def watched(x: Tensor, share: float, keys: Tensor | None, branch: int) -> Tensor:
        if keys is not None:
            seen.append((layer_by_key[tuple(map(int, keys))], branch))
        return drop(x, share, keys, branch)

    monkeypatch.setattr("attnbench.model.language_model.drop", watched)
    batch_nats(dropping(), batch)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]


def test_dropout_of_the_embedding_leaves_the_branches(monkeypatch):
    batch, seen = batch_at(0), []
    size = replace(MODEL, dropout=SHARE, dropout_of="embedding")
    model = build_model([mixer_settings("softmax")] * 2, size, vocabulary_size=len(VOCABULARY), seed=0)
    monkeypatch.setattr(
        "attnbench.model.language_model.drop",
        lambda x, share, keys, branch: (seen.append((share, branch)), drop(x, share, keys, branch))[1],
    )
    batch_nats(model, batch)
    assert [branch for share, branch in seen if share] == [0]
    with pytest.raises(ValueError, match=r"dropout=0.3: the batch has no keys"):
        loss_and_gradients(model, Batch(*batch[:2]), None, "float32")


def test_compiled_steps_drop_the_same(monkeypatch):
    plain, batch = dropping(), batch_at(1)
    graphs = watch_compiler(monkeypatch, run=lambda graph, inputs: graph.forward)
    torch.testing.assert_close(compiled_nats(torch.device("cpu"))(plain, batch), batch_nats(plain, batch))
    # The layer is in the keys, and both blocks are one graph.
    assert len(graphs) == 3


@pytest.mark.parametrize("share", [0.0, SHARE])
def test_a_captured_step_is_given_the_keys_of_its_own_batch(share, monkeypatch):
    class Replaying:
        """Stand in for a CUDA graph: what is copied into the tensors of the first call is all that a call sees."""

        def __init__(self, function: Any, *, others_ask: bool) -> None:
            assert not others_ask
            self.function, self.kept = function, None

        def __call__(self, *given: Tensor) -> Any:
            self.kept = self.kept or [tensor.clone() for tensor in given]
            for kept, tensor in zip(self.kept, given, strict=True):
                kept.copy_(tensor)
            return self.function(*self.kept)

    monkeypatch.setattr("attnbench.training.step.CapturedCall", Replaying)
    states = [TrainState.fresh(dropping(share)) for _ in range(2)]
    for state, captured in zip(states, (False, True), strict=True):
        batches = Batches(TOKENS, SEQ_LEN, TRAIN.batch_size, 0, "cpu")
        given = {"precision": "float32", "num_steps": 4, "hooks": [], "captured": captured}
        train(state, lambda step, batches=batches: text_batch(batches, step, share), TRAIN, **given)
    assert_equal_numbers(*map(numbers_of, states))


def test_the_share_is_in_the_hash_and_the_rows_where_it_is_not_0():
    words = ["data=embedded", "model=tiny", "logger=none", "device=cpu"]
    runs = [prepare(compose([*words, *word])) for word in ([], ["model.dropout=0"], ["model.dropout=0.1"])]
    assert runs[0].config_hash == runs[1].config_hash != runs[2].config_hash
    axes = [{name: value for name, value in run.row_settings().items() if name == "dropout"} for run in runs]
    assert axes == [{}, {}, {"dropout": 0.1}]
