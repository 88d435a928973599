"""Accuracy of a model on the labels of a batch."""

from typing import Any

import torch
from torch import Tensor

from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.training.loop import Batch

MAX_ELEMENTS = 2**25
"""Logits and scores of attention that one forward pass may have: 128 MiB in float32."""


@torch.no_grad()
def correct_labels(model: LanguageModel, batch: Batch) -> Tensor:
    """Tell where the most likely symbol is the target, (B, L) bool; False where there is no label.

    Runs in the precision of the caller, see `runtime.computing`, and over a bounded number of sequences at a time.

    Args:
        batch: with weights and positions.
    """
    length, num_labels = batch.tokens_BT.shape[1], batch.targets_BT.shape[1]
    at_once = max(1, MAX_ELEMENTS // (num_labels * model.embedding.num_embeddings + length**2))
    was_training = model.training
    model.eval()
    correct = []
    for start in range(0, len(batch.tokens_BT), at_once):
        part = batch.rows(slice(start, start + at_once))
        logits_BLC, _ = model(part.tokens_BT, positions_BL=part.positions_BL)
        correct.append(logits_BLC.argmax(-1) == part.targets_BT)
    model.train(was_training)
    return torch.cat(correct) & _is_label(batch)


def accuracy(correct: Tensor, metric: str, settings: dict[str, Any]) -> Measurement:
    """The share of `correct` that is true, as a row that says of how many."""
    value = float(correct.double().mean())
    return Measurement(metric=metric, value=value, unit="", settings=settings, num_samples=correct.numel())


def mean_accuracy(model: LanguageModel, batch: Batch) -> float:
    """The mean over sequences of the share of their labels that are right: a long sequence counts as a short one."""
    correct_B = correct_labels(model, batch).sum(1).double()
    return float((correct_B / _is_label(batch).sum(1)).mean())


def _is_label(batch: Batch) -> Tensor:
    assert batch.weight_BT is not None
    return batch.weight_BT > 0
