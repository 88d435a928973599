"""Accuracy on the labels of a batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.training.step import Batch

MAX_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits and attention scores of one forward pass: 128 MiB and 1 GiB in float32. Small passes leave a GPU waiting."""

WHOLE, LONG_ROWS = 2**15, 8
"""Positions up to which a test sequence is read in one forward pass, and how many longer ones are read together."""


@torch.no_grad()
def correct_labels(model: LanguageModel, batch: Batch) -> Tensor:
    """Return where the most likely symbol is the target, (B, L) bool; False without a label."""
    was_training = model.training
    model.eval()
    correct = []
    for rows in _parts(model, batch, 1):
        part = batch.rows(rows)
        correct.append(_most_likely(model, part) == part.targets_BT)
    model.train(was_training)
    return torch.cat(correct) & is_label(batch)


def _most_likely(model: LanguageModel, batch: Batch) -> Tensor:
    """Return the most likely symbol at each label, (B, L). Long sequences are read in pieces with a carried state."""
    (num_rows, length), positions_BL = batch.tokens_BT.shape, batch.positions_BL
    if length <= WHOLE:
        return model(batch.tokens_BT, positions_BL=positions_BL)[0].argmax(-1)
    assert positions_BL is not None, "a long sequence has few labels"
    state, symbol_BL = model.init_state(num_rows, length, model.embedding.weight.dtype), torch.zeros_like(positions_BL)
    for start, piece_BT in zip(range(0, length, WHOLE), batch.tokens_BT.split(WHOLE, dim=1), strict=True):
        place_BL = positions_BL - start
        logits_BLC, state = model(piece_BT, state, place_BL.clamp(0, piece_BT.shape[1] - 1))
        is_here_BL = (place_BL >= 0) & (place_BL < piece_BT.shape[1])
        symbol_BL = logits_BLC.argmax(-1).where(is_here_BL, symbol_BL)
    return symbol_BL


def accuracy(correct: Tensor, metric: str, settings: dict[str, Any]) -> Measurement:
    value = float(correct.double().mean())
    return Measurement(metric=metric, value=value, unit="", settings=settings, num_samples=correct.numel())


def macro_accuracy(correct_BL: Tensor, batch: Batch, metric: str, settings: dict[str, Any]) -> Measurement:
    """Return the mean, over the symbols that are asked for, of the share of their labels that are right."""
    target_N, correct_N = batch.targets_BT[is_label(batch)], correct_BL[is_label(batch)]
    asked_C = target_N.bincount()
    right_C = target_N[correct_N].bincount(minlength=len(asked_C))
    value = float((right_C[asked_C > 0] / asked_C[asked_C > 0].double()).mean())
    return Measurement(metric=metric, value=value, unit="", settings=settings, num_samples=len(target_N))


def mean_accuracy(model: LanguageModel, batch: Batch) -> float:
    """Return the mean over sequences of the share of their labels that are right."""
    return _mean(correct_labels(model, batch), batch)


@torch.no_grad()
def mean_accuracies(models: Sequence[LanguageModel], batches: Sequence[Batch]) -> list[float]:
    """Return `mean_accuracy` of each model on its own batch, all of one shape, in one pass."""
    template, was_training = models[0], models[0].training
    by_model = [dict(model.named_parameters()) for model in models]
    stacked = {name: torch.stack([parameters[name] for parameters in by_model]) for name in by_model[0]}

    def correct(parameters: dict[str, Tensor], tokens_BT: Tensor, targets_BL: Tensor, positions_BL: Tensor) -> Tensor:
        logits_BLC, _ = functional_call(template, parameters, (tokens_BT,), {"positions_BL": positions_BL})
        return logits_BLC.argmax(-1) == targets_BL

    template.eval()
    correct_RBL = []
    for rows in _parts(template, batches[0], len(models)):
        parts = [batch.rows(rows) for batch in batches]
        given = ([part.tokens_BT for part in parts], [part.targets_BT for part in parts])
        positions = [part.positions_BL for part in parts if part.positions_BL is not None]
        correct_RBL.append(torch.vmap(correct)(stacked, *map(torch.stack, (*given, positions))))
    template.train(was_training)
    of_models = torch.cat(correct_RBL, dim=1)
    return [_mean(of_model & is_label(batch), batch) for of_model, batch in zip(of_models, batches, strict=True)]


def _parts(model: LanguageModel, batch: Batch, num_models: int) -> Iterator[slice]:
    length, num_labels = batch.tokens_BT.shape[1], batch.targets_BT.shape[1]
    of_sequence = num_models * (num_labels * model.embedding.num_embeddings + length**2)
    at_once = LONG_ROWS if length > WHOLE else max(1, MAX_ELEMENTS[batch.tokens_BT.device.type] // of_sequence)
    return (slice(start, start + at_once) for start in range(0, len(batch.tokens_BT), at_once))


def _mean(correct_BL: Tensor, batch: Batch) -> float:
    return float((correct_BL.sum(1).double() / is_label(batch).sum(1)).mean())


def is_label(batch: Batch) -> Tensor:
    assert batch.weight_BT is not None
    return batch.weight_BT > 0
